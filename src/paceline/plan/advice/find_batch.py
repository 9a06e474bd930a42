"""The largest batch that fits, by doubling and then halving the gap."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBatch:
    """What was tried, and what to use."""

    largest: int
    """The largest that fits; 0 when not even the first does."""

    chosen: int
    """The largest with the margin left free; 0 when nothing fits."""

    at_limit: bool
    """Whether the search stopped at its limit, so that more might fit."""

    tried: tuple[tuple[int, bool], ...]
    """Each batch that was tried and whether it fits, in order."""


def find_batch(
    fits: Callable[[int], bool], *, start: int = 1, limit: int = 2**20, margin: float = 0.1
) -> FoundBatch:
    """The largest batch that fits, found with about 2 log2 of it tries.

    Args:
        fits: Whether a batch fits. What is larger than one that does not fit does not fit either.
        start: Tried first; when it does not fit, smaller ones are.
        limit: The largest that is tried.
        margin: Share of the largest that is left free, for samples that are longer than those
            tried and for what the allocator loses.

    >>> found = find_batch(lambda batch: batch <= 21, start=4)
    >>> found.largest, found.chosen, [batch for batch, _ in found.tried]
    (21, 18, [4, 8, 16, 32, 24, 20, 22, 21])
    """
    if not 1 <= start <= limit or not 0 <= margin < 1:
        raise ValueError("1 <= start <= limit and 0 <= margin < 1")
    tried: list[tuple[int, bool]] = []

    def ask(batch: int) -> bool:
        tried.append((batch, fits(batch)))
        return tried[-1][1]

    good, bad = 0, limit + 1
    batch = start
    while bad == limit + 1 and good < limit:
        if ask(batch):
            good, batch = batch, min(2 * batch, limit)
        else:
            bad = batch
    while bad - good > 1:
        middle = (good + bad) // 2
        if ask(middle):
            good = middle
        else:
            bad = middle
    chosen = max(1, int(good * (1 - margin))) if good else 0
    return FoundBatch(largest=good, chosen=chosen, at_limit=good == limit, tried=tuple(tried))
