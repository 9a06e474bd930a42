"""The newest step that every rank can be brought to after a failure, and from where.

A step passes these points in order on every rank:

1. its gradients are reduced and its saved buffers settled. Only then the rank
2. votes. The vote is one all-reduce: a rank that knows its outcome knows that all ranks voted, and
   so that each of them had its gradients.
3. The rank knows the outcome (refused or not, and the number that gradients are multiplied by),
4. and applies it, which needs no other rank where the optimizer updates each number by itself.

So when some rank knows the outcome of step n, each rank that lives has applied n, or has n - 1 and
the gradients of n: it rolls forward. Case by case, with n the newest step whose outcome any living
rank knows:

==============================================  ==================================================
where a rank was                                how its place comes to n
==============================================  ==================================================
alive, applied n                                its own state
alive, interrupted before it heard the outcome  its own state and gradients: rolls forward
alive, broke off while it applied n             as one that is dead
dead before its vote for n                      cannot be: no rank would know an outcome
dead after its vote                             a replica; else no rank has it: all resume from a
                                                lower tier, and the run says so
dead, alone in knowing the outcome of n + 1     n; the others compute step n + 1 again, from the
                                                same samples, to the same bits
==============================================  ==================================================

The last row is why the law is about ranks that live: what a rank did alone before it died is known
to no other. It holds for everything that all ranks had applied, as all that live had.

Steps that all leave out (a poison batch) change nothing and are nowhere here: a state is of the
last step before them.

Not covered: carrying it out (`Loop`).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one rank has, after a failure."""

    applied: int
    """Last step that its state has; -1 for none, or a torn one."""

    next_step: int | None = None
    """The step after it, when it has voted for that and has the gradients still."""

    decided: int = -1
    """Newest step whose outcome it knows; -1 for none."""


@dataclass(frozen=True, slots=True)
class Route:
    """A rank that needs the state, and a replica that has it."""

    to: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How all ranks come to one step."""

    step: int

    rolled: tuple[int, ...] = ()
    """Ranks that apply it first, by the gradients that they have."""

    routes: tuple[Route, ...] = ()
    """Copies from replicas, once those have rolled forward."""

    lost: tuple[int, ...] = ()
    """Ranks whose state of it no rank has: then none can resume from it."""


def plan_recovery(standings: Sequence[Standing], replicas: Sequence[Sequence[int]]) -> RecoveryPlan:
    """How every rank gets the newest step.

    The newest is one whose outcome some rank knows; where that cannot be reached, because the
    gradients are not kept, the newest that some rank's whole state has.

    Args:
        replicas: Groups of ranks that hold the same; every rank is in one.

    >>> def plan(*applied, replicas):
    ...     return plan_recovery([Standing(applied=step) for step in applied], replicas)
    >>> plan(7, -1, 6, 7, replicas=[(0, 1), (2, 3)]).routes
    (Route(to=1, source=0), Route(to=2, source=3))
    >>> plan(7, 7, -1, -1, replicas=[(0, 1), (2, 3)]).lost
    (2, 3)
    >>> standings = [Standing(applied=7, decided=7), Standing(applied=6, next_step=7)]
    >>> plan_recovery(standings, [(0,), (1,)])
    RecoveryPlan(step=7, rolled=(1,), routes=(), lost=())
    """
    applied = max(standing.applied for standing in standings)
    decided = max(standing.decided for standing in standings)
    if max(applied, decided) < 0:
        return RecoveryPlan(step=-1, lost=tuple(range(len(standings))))
    newest = _plan_for(max(applied, decided), standings, replicas)
    if newest.lost and decided > applied >= 0:
        return _plan_for(applied, standings, replicas)
    return newest


def _plan_for(
    step: int, standings: Sequence[Standing], replicas: Sequence[Sequence[int]]
) -> RecoveryPlan:
    is_decided = any(standing.decided == step for standing in standings)
    rolled: list[int] = []
    routes: list[Route] = []
    lost: list[int] = []
    for group in replicas:
        late = [rank for rank in group if is_decided and standings[rank].next_step == step]
        sources = [rank for rank in group if standings[rank].applied == step] + late
        needy = [rank for rank in group if rank not in sources]
        rolled += late
        if sources:
            routes += [Route(rank, sources[n % len(sources)]) for n, rank in enumerate(needy)]
        else:
            lost += needy
    return RecoveryPlan(step=step, rolled=tuple(rolled), routes=tuple(routes), lost=tuple(lost))
