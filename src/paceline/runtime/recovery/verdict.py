"""Whose numbers are wrong, from what every rank's fingerprint is: no torch, no talking.

A group of replicas holds the same bytes. When it does not, a strict majority is right: of three or
more, one that is alone is odd. Of two nobody can say, unless one of them knows that its own bytes
changed while nothing wrote them. Ranks without replicas are judged by that alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLEARLY = 4.0
"""How many times as far from the recomputed numbers a rank must be to be named. What was computed
with a wrong parameter is off on all ranks, and the one with it is off by more. A guess, with which
benchmarks/fingerprint.py names no wrong rank."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison of all ranks found wrong."""

    odd: tuple[int, ...] = ()
    undecided: Groups = ()
    """Groups of replicas that differ, in which no majority says who is right."""

    source_of: Mapping[int, int]
    """For each odd rank that has one, the replica that is right."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks of which some are wrong, nobody knows which."""
        return tuple(rank for group in self.undecided for rank in group)

    @property
    def can_copy(self) -> bool:
        """Whether every wrong rank is known and has a replica that is right."""
        return not self.undecided and all(rank in self.source_of for rank in self.odd)


def judge(groups: Groups, values: Sequence[int], moved: Sequence[bool]) -> Verdict | None:
    """Who is wrong, or None when nobody is.

    Args:
        moved: Whether a rank's own fingerprint changed between two updates. True on every rank is
            no fault but a program that writes its parameters itself: pass False for all then.

    >>> judge(((0, 1, 2), (3, 4, 5)), [7, 7, 7, 1, 9, 1], [False] * 6)
    Verdict(odd=(4,), undecided=(), source_of={4: 3})
    >>> judge(((0, 1),), [7, 8], [False, True])
    Verdict(odd=(1,), undecided=(), source_of={1: 0})
    >>> judge(((0, 1),), [7, 8], [False, False])
    Verdict(odd=(), undecided=((0, 1),), source_of={})
    """
    odd: list[int] = []
    undecided: list[tuple[int, ...]] = []
    source_of: dict[int, int] = {}
    for group in groups:
        held = [rank for rank in group if not moved[rank]]
        right = _majority([values[rank] for rank in held])
        if held and right is None:
            undecided.append(group)
            continue
        wrong = [rank for rank in group if moved[rank] or values[rank] != right]
        odd += wrong
        source = next((rank for rank in held if values[rank] == right), None)
        if source is not None:
            source_of.update(dict.fromkeys(wrong, source))
    if not odd and not undecided:
        return None
    return Verdict(odd=tuple(sorted(odd)), undecided=tuple(undecided), source_of=source_of)


def differing(
    verdict: Verdict, by_name: Sequence[Mapping[str, int]], moved: Sequence[Sequence[str]]
) -> dict[int, tuple[str, ...]]:
    """Which tensors of which rank are wrong, or differ among suspects.

    Args:
        by_name: Each rank's fingerprint of every tensor.
        moved: The tensors of each rank that changed between two updates.
    """
    found: dict[int, tuple[str, ...]] = {}
    for rank in verdict.odd:
        source = verdict.source_of.get(rank)
        if source is None:
            found[rank] = tuple(moved[rank])
        else:
            found[rank] = _other(by_name[rank], by_name[source])
    for group in verdict.undecided:
        differ = dict.fromkeys(
            name for rank in group for name in _other(by_name[rank], by_name[group[0]])
        )
        found.update({rank: tuple(differ) for rank in group})
    return found


def held_by_all(
    verdict: Verdict, by_name: Sequence[Mapping[str, int]], tensors: Mapping[int, Sequence[str]]
) -> dict[int, tuple[str, ...]]:
    """Tensors that a wrong rank's source has too, or all suspects of a group have: no other can be
    copied or compared.

    Args:
        by_name: Each rank's fingerprint of every tensor.
    """
    peers: dict[int, tuple[int, ...]] = {
        rank: (rank, source) for rank, source in verdict.source_of.items()
    }
    peers |= {rank: group for group in verdict.undecided for rank in group}
    return {
        rank: tuple(n for n in names if all(n in by_name[r] for r in peers.get(rank, (rank,))))
        for rank, names in tensors.items()
    }


def farther(distances: Mapping[int, float], noise: float = 0.0) -> tuple[int, ...]:
    """The ranks that are wrong, from how far each suspect's numbers were from the recomputed ones.

    The nearest is right, and others that are clearly farther are wrong; empty when none is: then
    the replay does not tell.

    Args:
        distances: Where the suspects differed, by rank.
        noise: How far their other numbers were, which they agreed on.

    >>> farther({0: 0.0, 1: 0.5}), farther({0: 0.25, 1: 0.25}), farther({0: 0.25, 1: 0.26})
    ((1,), (), ())
    >>> farther({0: 0.0, 1: 0.001}, noise=0.002)
    ()
    """
    least = CLEARLY * max(noise, min(distances.values()))
    return tuple(rank for rank, far in sorted(distances.items()) if far > least)


def _majority(values: Sequence[int]) -> int | None:
    """What more than half have; the only one's own."""
    for value in dict.fromkeys(values):
        if 2 * values.count(value) > len(values):
            return value
    return None


def _other(ours: Mapping[str, int], theirs: Mapping[str, int]) -> tuple[str, ...]:
    names = dict.fromkeys([*ours, *theirs])
    return tuple(name for name in names if ours.get(name) != theirs.get(name))
