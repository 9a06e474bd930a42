"""Which samples a step reads: a pure function, so that there is no loader state to restore.

A run is one long line of positions, `step x global batch + slot`. Each epoch is a permutation of
all samples, and position p reads entry `p mod num_samples` of epoch `p // num_samples`. So every
epoch reads each sample exactly once, whatever the ranks, the micro-batch and the restarts, and a
batch may run over an epoch's end.
"""

from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def sample_ids(step: int, slots: range, *, seed: int, global_batch: int, num_samples: int) -> Ids:
    """Ids of the samples in some slots of one step's global batch.

    Args:
        step: Steps already done: 0 for the first.
        slots: Places in the global batch, such as one of `rank_slots`.
        seed: The job's seed.
        global_batch: Samples in one step, over all ranks.
        num_samples: Samples in the data set; may be fewer than the global batch.

    >>> sample_ids(0, range(4), seed=1, global_batch=4, num_samples=4).tolist()
    [3, 2, 0, 1]
    """
    positions = step * global_batch + np.arange(slots.start, slots.stop, slots.step, dtype=np.int64)
    epochs, places = np.divmod(positions, num_samples)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        ids[here] = _permutation(seed, int(epoch), num_samples)[places[here]]
    return ids


def rank_slots(rank: int, world: int, global_batch: int, micro_batch: int) -> list[range]:
    """One rank's places in the global batch, one range a micro-batch, in the order it runs them.

    >>> rank_slots(1, world=2, global_batch=8, micro_batch=2)
    [range(4, 6), range(6, 8)]
    """
    share = global_batch // world
    assert share * world == global_batch, "the planner gives every rank the same share"
    assert share % micro_batch == 0, "the planner fills every micro-batch"
    starts = range(rank * share, (rank + 1) * share, micro_batch)
    return [range(start, start + micro_batch) for start in starts]


def batch_digest(step: int, *, seed: int, global_batch: int, num_samples: int) -> str:
    """xxh3-64 of all sample ids of one step, in slot order: the step's line in the ledger."""
    ids = sample_ids(
        step, range(global_batch), seed=seed, global_batch=global_batch, num_samples=num_samples
    )
    return xxhash.xxh3_64_hexdigest(ids.astype("<i8").tobytes())


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
