"""Which rank the others wait for, when a run makes no progress. Pure.

A rank that waits in a collective looks stuck, and is a victim; ending it helps nobody. So all
ranks are looked at and compared, in this order, each comparison among those the one before left:

1. who is behind: in an earlier step, or not yet in the vote that the others are in;
2. who does not turn: stopped, or its interpreter is held;
3. who has not called a collective that others of its group have, and waits in no other group for
   one that is in turn behind there;
4. who is behind within the step, where the layout has every rank do its micro-batches in order;
5. whose traceback is outside of any collective, when others are inside of one;
6. who loops, when others sleep.

Whoever is left is who the others wait for. It is fenced once it is late by its own limit: a rank
that saves a checkpoint may take long while all others wait in the next step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.control.messages import At, Seen
from paceline.control.slots import Phase
from paceline.units import numbered


@dataclass(frozen=True, slots=True)
class Fence:
    """End these ranks: the others wait for them."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody is to be ended yet."""

    why: str


@dataclass(frozen=True, slots=True)
class NobodyBehind:
    """Every rank is late and none differs from the others: they wait for each other."""


Verdict = Fence | Wait | NobodyBehind

_Group = dict[int, Seen]


def blame(sightings: Mapping[int, Seen], *, num_ranks: int, in_order: bool = True) -> Verdict:
    """Whom to end now.

    Args:
        sightings: Rank -> what its agent saw of it, all at about the same moment.
        num_ranks: How many ranks there are; those without a sighting have an agent that has not
            answered, which is looked into by itself.
        in_order: Whether every rank does its micro-batches one after the other, forward before
            backward. Not so in a pipeline.

    >>> from msgspec.structs import replace
    >>> victim = Seen(worker=0, generation=1, kind="waiting", phase=Phase.VOTE, step=7,
    ...     micro_batch=0, is_certain=False, waited_s=20.0, limit_s=10.0, is_late=True)
    >>> culprit = replace(victim, phase=Phase.FORWARD, kind="looping")
    >>> blame({0: victim, 1: culprit, 2: victim}, num_ranks=3)
    Fence(ranks=(1,))
    """
    stopped = [rank for rank, seen in sightings.items() if seen.is_certain and seen.is_late]
    if stopped:
        return Fence(tuple(sorted(stopped)))
    if not any(seen.is_late for seen in sightings.values()):
        return Wait("no rank is late any more")
    missing = [rank for rank in range(num_ranks) if rank not in sightings]
    if missing:
        return Wait(f"nothing was seen of {numbered('rank', missing[:8])}")
    group = dict(sightings)
    tests: list[Callable[[_Group], _Group]] = [_behind, _not_turning, _behind_in_group]
    if in_order:
        tests.append(_behind_within_step)
    for test in (*tests, _outside_collective, _looping):
        group = test(group) or group
    late = sorted(rank for rank, seen in group.items() if seen.is_late)
    if len(late) == num_ranks and num_ranks > 1:
        return NobodyBehind()
    if late:
        return Fence(tuple(late))
    awaited = numbered("rank", sorted(group)[:8])
    phases = " and ".join(sorted({seen.phase.words for seen in group.values()}))
    return Wait(f"the others wait for {awaited}, in {phases} within the time that takes")


def _place(seen: Seen) -> tuple[int, int]:
    """A rank's place, comparable between ranks of any layout."""
    if seen.phase < Phase.FORWARD:  # not training yet: in the order of the phases
        return -1, seen.phase
    is_computing = seen.phase in (Phase.FORWARD, Phase.BACKWARD)
    return seen.step, 0 if is_computing else seen.phase


def _behind(group: _Group) -> _Group:
    first = min(map(_place, group.values()))
    return {rank: seen for rank, seen in group.items() if _place(seen) == first}


def _not_turning(group: _Group) -> _Group:
    return {r: seen for r, seen in group.items() if seen.kind in ("stopped", "gil held")}


def _behind_in_group(group: _Group) -> _Group:
    called: dict[str, dict[int, At]] = {}
    for rank, seen in group.items():
        for name, at in (seen.collectives or {}).items():
            called.setdefault(name, {})[rank] = at
    behind: set[int] = set()
    waiting: set[int] = set()
    for name, places in called.items():
        # One that has called none yet is missing from those it is a member of.
        for rank in map(int, name.rpartition("|")[2].split(",")):
            if rank in group and group[rank].collectives:
                places.setdefault(rank, (0, 0))
        furthest = max(number for number, _ in places.values())
        late = {rank for rank, (number, _) in places.items() if number < furthest}
        behind |= late
        if late:
            waiting |= {
                r for r, (number, ended) in places.items() if r not in late and ended < number
            }
    return {rank: group[rank] for rank in behind - waiting or behind}


def _behind_within_step(group: _Group) -> _Group:
    first = min((seen.micro_batch, seen.phase) for seen in group.values())
    return {r: seen for r, seen in group.items() if (seen.micro_batch, seen.phase) == first}


def _outside_collective(group: _Group) -> _Group:
    if not any(seen.in_collective for seen in group.values()):
        return {}
    return {rank: seen for rank, seen in group.items() if seen.in_collective is False}


def _looping(group: _Group) -> _Group:
    return {rank: seen for rank, seen in group.items() if seen.kind == "looping"}
