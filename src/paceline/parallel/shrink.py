"""Training on fewer ranks, and which part of the state a rank has in a layout.

Either the global batch stays what it is: fewer data ranks do more micro-batches each, and where it
does not divide over them, some do a sample more than others. Or each rank keeps its micro-batches,
and the batch shrinks with the number of data ranks. The model-parallel axes stay, so that the parts
of the model that live ranks hold are still parts of it.

Leaves out: whether it fits into memory (a shard of fewer ranks is larger), and how fast it is.
"""

from dataclasses import replace

from paceline.choices import BatchPolicy
from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import coordinates
from paceline.parallel.replicas import share_of

Part = tuple[str | int, ...]
"""Equal for two ranks, also of different layouts, exactly when they hold the same tensors."""


def shrunk(layout: Layout, num_ranks: int, batch: BatchPolicy = "keep") -> Layout | None:
    """The largest layout of at most so many ranks, or None.

    To keep the global batch, micro-batches keep their size where it allows that, and never grow:
    they fitted. The stages of a pipeline have micro-batches of one size, so there the data ranks
    divide the batch. A batch that shrinks keeps the micro-batches of each rank as they are.

    >>> small = shrunk(Layout(data=4, sharding="none", micro_batch=2, accumulation=3), 3)
    >>> small.data, small.micro_batch, small.accumulation, small.global_batch
    (3, 2, 4, 24)
    >>> small = shrunk(Layout(data=3, sharding="none", micro_batch=3, accumulation=1), 2)
    >>> small.data, [small.micro_batches_of(rank) for rank in range(2)], small.global_batch
    (2, [[3, 2], [2, 2]], 9)
    >>> small = shrunk(Layout(data=3, sharding="none", micro_batch=3, accumulation=1), 2, "shrink")
    >>> small.data, [small.micro_batches_of(rank) for rank in range(2)], small.global_batch
    (2, [[3], [3]], 6)
    >>> shrunk(Layout(data=2, sharding="none", micro_batch=1, accumulation=1, tensor=2), 1)
    """
    per_data = layout.num_ranks // layout.data
    most = min(layout.data, num_ranks // per_data)
    if most == layout.data:
        return layout
    for data in range(most, 0, -1):
        found = _with_data(layout, data, batch)
        if found is not None:
            return found
    return None


def part_of(layout: Layout, rank: int) -> Part:
    """What a rank holds.

    >>> four = Layout(data=4, sharding="hybrid", shard=2, micro_batch=1, accumulation=1)
    >>> two = Layout(data=2, sharding="full", micro_batch=1, accumulation=2)
    >>> part_of(four, 3) == part_of(two, 1), part_of(four, 3) == part_of(four, 1)
    (True, True)
    """
    place = coordinates(layout, rank)
    # One group of hybrid sharding and a group of full sharding cut the state alike.
    kind = "full" if layout.sharding == "hybrid" else layout.sharding
    return (
        kind,
        layout.shard_degree,
        layout.tensor,
        layout.pipeline,
        layout.expert,
        layout.chunks,
        place.tensor,
        place.pipeline,
        share_of(layout, place),
    )


def rounding_bound(global_batch: int, unit_roundoff: float) -> float:
    """How far the mean of a batch can be from itself, added up in another order, of its terms' mean
    magnitude: 2 (n - 1) u.

    For losses, which are positive, that is the relative difference in the first step after the
    order changed. Later steps start from parameters that differ already.

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2.
    """
    return 2 * (global_batch - 1) * unit_roundoff


def _with_data(layout: Layout, data: int, policy: BatchPolicy) -> Layout | None:
    dp_cp = data * layout.context
    if dp_cp % layout.expert:
        return None
    batch, most = layout.global_batch, -(-layout.global_batch // data)
    micro_batch, accumulation = layout.micro_batch, layout.accumulation
    if policy == "shrink":
        batch = data * micro_batch * accumulation
    elif layout.pipeline > 1:
        if batch % data:
            return None
        micro_batch = max(n for n in range(1, layout.micro_batch + 1) if most % n == 0)
        accumulation = most // micro_batch
        if accumulation % layout.accumulation:
            return None  # a schedule takes multiples of what it took
    else:
        accumulation = -(-most // layout.micro_batch)
        micro_batch = -(-most // accumulation)
    sharding, shard = layout.sharding, layout.shard
    if sharding == "hybrid":
        if dp_cp <= layout.shard_degree:
            sharding, shard = "full", None
        elif dp_cp % layout.shard_degree:
            return None
    if dp_cp == 1 and layout.offload == "none":
        sharding = "none"
    # One micro-batch a step reduces its gradients at once; several would hold them whole.
    at_once = sharding in {"full", "hybrid"} and layout.accumulation == 1 < accumulation
    return replace(
        layout,
        data=data,
        micro_batch=micro_batch,
        accumulation=accumulation,
        reduce_every_micro_batch=layout.reduce_every_micro_batch or at_once,
        batch=None if data * micro_batch * accumulation == batch else batch,
        sharding=sharding,
        shard=shard,
    )
