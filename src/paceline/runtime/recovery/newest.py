"""The newest step that every rank can be brought to after a failure, and from where.

A step of a rank i, whose shadow another rank h keeps, passes these points in order:

1. its gradients are reduced and its saved buffers settled; they are sent to h, and those of its own
   wards have come. Only then it
2. votes. The vote is one all-reduce: whoever knows its outcome knows that all ranks voted, and so
   that every shadow's holder has that step's gradients.
3. It knows the outcome (refused or not, and the number that gradients are multiplied by),
4. applies it, which needs nobody else, and does the same to the shadows that it keeps.

So when somebody knows the outcome of step n, each rank that lives has applied n, or has n - 1 and
the gradients of n: it rolls forward. Of a rank that is dead, or broke off inside 4, the holder has
a shadow at n, or one at n - 1 and the gradients: the same. Case by case, with n the newest step
whose outcome any living rank knows:

==============================================  ==================================================
where a rank was                                how its place comes to n
==============================================  ==================================================
alive, applied n                                its own state
alive, interrupted before it heard the outcome  its own state and gradients: rolls forward
alive, broke off while it applied n             as one that is dead
dead before its vote for n                      cannot be: nobody would know an outcome
dead between its vote and its update, or later  a replica; else its shadow, rolled forward if need
                                                be
dead, and its shadow's holder too               nobody has it: a lower tier, and the run says so
dead, alone in knowing the outcome of n + 1     n; the others do step n + 1 again, from the same
                                                samples, to the same bits
==============================================  ==================================================

The last row is why the law is about ranks that live: what a rank did alone before it died is known
to nobody. It holds for everything that all ranks had applied, as all that live had.

Steps that all leave out (a poison batch) change nothing and are nowhere here: a state is of the
last step before them.

Leaves out: carrying it out (`Loop`, `shadows.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A shadow that a rank keeps."""

    step: int
    """That it is of."""

    next_step: int | None = None
    """The step after it, when its gradients have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one rank has, after a failure."""

    applied: int
    """Last step that its state has; -1 for none, or a torn one."""

    next_step: int | None = None
    """The step after it, when it has voted for that and has the gradients still."""

    decided: int = -1
    """Newest step whose outcome it knows; -1 for none."""

    shadows: Mapping[int, Copy] = field(default_factory=dict)
    """By rank whose they are."""


@dataclass(frozen=True, slots=True)
class Route:
    """A rank that needs the state, and one that has it."""

    to: int
    source: int
    tier: Literal["replica", "shadow"] = "replica"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How all ranks come to one step."""

    step: int

    rolled: tuple[int, ...] = ()
    """Ranks that apply it first, by the gradients that they have."""

    routes: tuple[Route, ...] = ()
    """Who gets it from whom."""

    lost: tuple[int, ...] = ()
    """Ranks whose state of it is nowhere: then nobody can go on from it."""


def find_reach(standings: Sequence[Standing], replicas: Sequence[Sequence[int]]) -> Reach:
    """How every rank gets the newest step.

    The newest is one whose outcome some rank knows; where that cannot be reached, because the
    gradients are not kept, the newest that some rank's whole state has.

    Args:
        standings: By rank.
        replicas: Groups of ranks that hold the same; every rank is in one.

    >>> def reach(*applied, replicas):
    ...     return find_reach([Standing(applied=each) for each in applied], replicas)
    >>> reach(7, -1, 6, 7, replicas=[(0, 1), (2, 3)]).routes
    (Route(to=1, source=0, tier='replica'), Route(to=2, source=3, tier='replica'))
    >>> reach(7, 7, -1, -1, replicas=[(0, 1), (2, 3)]).lost
    (2, 3)
    >>> kept = {1: Copy(step=6, next_step=7)}
    >>> found = find_reach(
    ...     [Standing(applied=7, decided=7, shadows=kept), Standing(applied=-1)], [(0,), (1,)])
    >>> found.step, found.routes
    (7, (Route(to=1, source=0, tier='shadow'),))
    """
    applied = max(each.applied for each in standings)
    decided = max(each.decided for each in standings)
    if max(applied, decided) < 0:
        return Reach(step=-1, lost=tuple(range(len(standings))))
    newest = _reach(max(applied, decided), standings, replicas)
    if newest.lost and decided > applied >= 0:
        return _reach(applied, standings, replicas)
    return newest


def _reach(step: int, standings: Sequence[Standing], replicas: Sequence[Sequence[int]]) -> Reach:
    is_decided = any(each.decided == step for each in standings)
    rolled: list[int] = []
    routes: list[Route] = []
    lost: list[int] = []
    for group in replicas:
        late = [rank for rank in group if is_decided and standings[rank].next_step == step]
        sources = [rank for rank in group if standings[rank].applied == step] + late
        needy = [rank for rank in group if rank not in sources]
        rolled += late
        for number, rank in enumerate(needy):
            if sources:
                routes.append(Route(rank, sources[number % len(sources)]))
                continue
            holder = next(_holders(rank, step, standings, is_decided=is_decided), None)
            if holder is None:
                lost.append(rank)
            else:
                routes.append(Route(rank, holder, "shadow"))
    return Reach(step=step, rolled=tuple(rolled), routes=tuple(routes), lost=tuple(lost))


def _holders(
    rank: int, step: int, standings: Sequence[Standing], *, is_decided: bool
) -> Iterator[int]:
    """Ranks whose shadow of another is of a step, or can be."""
    for holder, standing in enumerate(standings):
        copy = standing.shadows.get(rank)
        if copy is None:
            continue
        if copy.step == step or (is_decided and copy.next_step == step):
            yield holder
