"""Which samples a step reads: a pure function, so that there is no loader state to restore.

A run is one long line of positions: each step reads the next global batch of them, whose size may
change from step to step. Each epoch is a permutation of
all samples, and position p reads entry `p mod num_samples` of epoch `p // num_samples`. So every
epoch reads each sample exactly once, whatever the ranks, the micro-batch and the restarts, and a
batch may run over an epoch's end.

In a mixture the positions are given out to sources by weight, and each source has epochs of its
own: position p is the source's draw number d, which is place `d mod size` of epoch `d // size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np
import xxhash
from numpy.typing import NDArray

from paceline.parallel.layout import Layout
from paceline.prepare.index import SourceIndex
from paceline.prepare.words import mixed
from paceline.runtime.batches import Batches

Ids = NDArray[np.int64]

Place = tuple[int, int]
"""A step, from 1, and one of its micro-batches, from 0."""

_MOST_SORTED = 2**24
"""Samples of an epoch whose order is a sorted table: 8 bytes each on every rank, in up to four
tables. Larger data has its order computed place by place, without a table. The bound is part of the
order: another would resume a run with other samples."""

_ROUNDS = 8
"""Rounds of the Feistel network. Four make a permutation that looks random (Luby and Rackoff 1988)
where the round function does; ours is a hash, so twice as many."""

_BLOCK = 1024
"""Positions whose sources are drawn together: weights are kept at the edges of blocks. A guess; as
the bound above, it is part of the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sources with weights. Ids run through the sources: those of the first come first."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    """Share of the positions that each source gets; they need not add up to 1."""

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.weights), "a weight for each source"
        assert min(self.sizes) > 0
        assert min(self.weights) >= 0
        assert any(self.weights), "a source that is drawn from"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRank:
    """One data rank of a run: which samples its micro-batches have."""

    seed: int
    layout: Layout
    rank: int
    """Among the data ranks. Ranks that share a sample have the same one."""

    batches: Batches
    """Those of the run, which the step loop keeps."""

    def slots(self, place: Place) -> range:
        """Places in the step's global batch."""
        return rank_slots(self.layout, self.rank)[place[1]]

    def ids(self, place: Place, num_samples: "int | Mixture") -> Ids:
        """Ids of one micro-batch's samples."""
        return self._ids(place[0], self.slots(place), num_samples)

    def digest(self, place: Place, num_samples: "int | Mixture") -> str:
        """xxh3-64 of all sample ids of the step, in slot order: its line in the ledger."""
        return _digest(self._ids(place[0], range(self.layout.global_batch), num_samples))

    def after(self, place: Place) -> Place:
        """The next micro-batch."""
        step, index = place
        is_last = index + 1 == self.layout.accumulation
        return (step + 1, 0) if is_last else (step, index + 1)

    def _ids(self, step: int, slots: range, num_samples: "int | Mixture") -> Ids:
        start = self.batches.start(step)
        positions = np.arange(start + slots.start, start + slots.stop, dtype=np.int64)
        return _ids_at(positions, self.seed, num_samples)


def order_of(sources: Sequence[SourceIndex]) -> int | Mixture:
    """What ids are drawn from: all samples alike where no source has a weight, else sources."""
    sizes = tuple(source.samples for source in sources if source.samples)
    weights = tuple(source.weight or 0.0 for source in sources if source.samples)
    if len(sizes) < 2 or not any(weights):
        return sum(sizes)
    return Mixture(sizes=sizes, weights=weights)


def sample_ids(
    step: int, slots: range, *, seed: int, global_batch: int, num_samples: int | Mixture
) -> Ids:
    """Ids of the samples in some slots of one step's global batch.

    Args:
        step: Steps already done: 0 for the first.
        slots: Places in the global batch, such as one of `rank_slots`.
        num_samples: Samples in the data set, which may be fewer than the global batch; or sources
            with weights.

    >>> sample_ids(0, range(4), seed=1, global_batch=4, num_samples=4).tolist()
    [3, 2, 0, 1]
    """
    positions = step * global_batch + np.arange(slots.start, slots.stop, slots.step, dtype=np.int64)
    return _ids_at(positions, seed, num_samples)


def _ids_at(positions: Ids, seed: int, num_samples: int | Mixture) -> Ids:
    if isinstance(num_samples, Mixture):
        return _mixed_ids(positions, seed, num_samples)
    epochs, places = np.divmod(positions, num_samples)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order = _walked if num_samples > _MOST_SORTED else _sorted
        ids[here] = order(places[here], seed, int(epoch), num_samples)
    return ids


def rank_slots(layout: Layout, rank: int) -> list[range]:
    """One data rank's places in the global batch, one range a micro-batch, in the order it runs
    them. A micro-batch of no samples reads the rank's last one again, which then counts nothing.

    >>> rank_slots(Layout(data=2, sharding="none", micro_batch=2, accumulation=2), 1)
    [range(4, 6), range(6, 8)]
    >>> rank_slots(Layout(data=2, sharding="none", micro_batch=1, accumulation=3, batch=5), 1)
    [range(3, 4), range(4, 5), range(4, 5)]
    """
    share, rest = divmod(layout.global_batch, layout.data)
    start = rank * share + min(rank, rest)
    slots = []
    for size in layout.micro_batches_of(rank):
        slots.append(range(start, start + size) if size else range(start - 1, start))
        start += size
    return slots


def batch_digest(step: int, *, seed: int, global_batch: int, num_samples: int | Mixture) -> str:
    """xxh3-64 of all sample ids of one step, in slot order: the step's line in the ledger."""
    ids = sample_ids(
        step, range(global_batch), seed=seed, global_batch=global_batch, num_samples=num_samples
    )
    return _digest(ids)


def _digest(ids: Ids) -> str:
    return xxhash.xxh3_64_hexdigest(ids.astype("<i8").tobytes())


def _mixed_ids(positions: Ids, seed: int, mixture: Mixture) -> Ids:
    ids = np.empty_like(positions)
    starts = np.cumsum([0, *mixture.sizes])
    blocks, places = np.divmod(positions, _BLOCK)
    for block in np.unique(blocks):
        here = np.flatnonzero(blocks == block)
        sources, draws = (each[places[here]] for each in _sources_of(int(block), seed, mixture))
        for source in np.unique(sources).tolist():
            size = mixture.sizes[source]
            epochs, at = np.divmod(draws[sources == source], size)
            found = np.empty_like(at)
            for epoch in np.unique(epochs).tolist():
                # A key that no source without weights has, and no other source.
                key = epoch + (source + 1) * 2**32
                found[epochs == epoch] = _walked(at[epochs == epoch], seed, key, size)
            ids[here[sources == source]] = starts[source] + found
    return ids


@lru_cache(maxsize=8)
def _sources_of(block: int, seed: int, mixture: Mixture) -> tuple[Ids, Ids]:
    before, after = (_due(edge * _BLOCK, mixture) for edge in (block, block + 1))
    in_order = np.repeat(np.arange(len(before)), after - before)
    sources = in_order[_walked(np.arange(_BLOCK), seed, block + 2**63, _BLOCK)]
    draws = np.empty_like(sources)
    for source in np.unique(sources):
        draws[sources == source] = np.arange(before[source], after[source])
    return sources, draws


def _due(num_positions: int, mixture: Mixture) -> Ids:
    """How many of the first positions each source gets, which never falls as they become more.

    A source of share w has its draw j at time (j + 1/2) / w, and the positions go to the earliest
    draws (Webster's method of apportionment): a small source gets its turn too, and no rounding
    adds up. A share is kept to within half the number of sources.

    >>> _due(1024, Mixture(sizes=(5, 5, 5), weights=(0.7, 0.2999, 0.0001))).tolist()
    [717, 307, 0]
    """
    shares = np.array(mixture.weights) / sum(mixture.weights)
    # All draws up to a time that is surely before the last of them, then one after the other.
    early = max(0, num_positions - 2 * len(shares))
    due = np.floor(shares * early + 0.5).astype(np.int64)
    coming = [
        ((int(drawn) + 0.5) / share, source)
        for source, (drawn, share) in enumerate(zip(due, shares.tolist(), strict=True))
        if share > 0
    ]
    heapify(coming)
    for _ in range(num_positions - int(due.sum())):
        _, source = coming[0]
        due[source] += 1
        heapreplace(coming, ((int(due[source]) + 0.5) / float(shares[source]), source))
    return due


def _sorted(places: Ids, seed: int, epoch: int, num_samples: int) -> Ids:
    """The samples at some places of an epoch's order, from a table."""
    return _permutation(seed, epoch, num_samples)[places]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_samples: int) -> Ids:
    """The order of one epoch: the sort order of raw Philox draws keyed by (seed, epoch).

    Sorting raw draws, and not `Generator.permutation`, because NumPy promises the same stream of a
    bit generator for ever, and of a generator's methods only within a version (NEP 19).
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    draws = np.random.Philox(key=key).random_raw(num_samples)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def _walked(places: Ids, seed: int, epoch: int, num_samples: int) -> Ids:
    """The samples at some places of an epoch's order, computed in memory for these places alone.

    A Feistel network permutes the numbers below a power of four that is less than four times
    `num_samples`; what falls outside is permuted again until it falls inside ("cycle walking":
    Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains). Its keys are raw Philox draws
    keyed by (seed, epoch), as the table's are.

    >>> sorted(_walked(np.arange(11), 1, 0, 11).tolist()) == list(range(11))
    True
    """
    bits = max(1, -(-(num_samples - 1).bit_length() // 2))
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    keys = np.random.Philox(key=key).random_raw(_ROUNDS)
    ids = _feistel(places.astype(np.uint64), keys, bits)
    while (outside := ids >= num_samples).any():
        ids[outside] = _feistel(ids[outside], keys, bits)
    return ids.astype(np.int64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(bits), np.uint64(2**bits - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mixed(right ^ key) & mask)
    return (left << shift) | right
