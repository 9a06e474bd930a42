"""Which ranks hold the same state, and which rank may keep a copy of another's.

A rank's state is what it alone would have to be given back: parameters, saved buffers and optimizer
state, as they lie on it. Leaves out tensors that only some of a rank's state share, such as the
norms of a tensor group: a rank is healed whole.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import Coordinates, rank_map


def replicas_of(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that hold exactly the same tensors; a rank without a replica is alone.

    Every rank is in one group; groups and their ranks are in order.

    Without sharding, ranks of one tensor, pipeline and expert place are replicas, whatever samples
    and tokens they read. With `hybrid` sharding those at the same place of different copies are,
    unless experts are shared by more ranks than a copy: their ranks then share the experts of all
    copies, and no two hold the same. With `zero1`, `zero2` and `full` every rank is alone.

    >>> replicas_of(Layout(data=2, sharding="none", micro_batch=1, accumulation=1, tensor=2))
    ((0, 2), (1, 3))
    >>> replicas_of(Layout(data=4, sharding="hybrid", shard=2, micro_batch=1, accumulation=1))
    ((0, 2), (1, 3))
    >>> replicas_of(Layout(data=3, sharding="full", micro_batch=1, accumulation=1))
    ((0,), (1,), (2,))
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for place in rank_map(layout):
        key = (place.pipeline, place.tensor, share_of(layout, place))
        found.setdefault(key, []).append(place.rank)
    return tuple(tuple(ranks) for ranks in found.values())


def neighbour_of(layout: Layout, nodes: Sequence[int], rank: int) -> int | None:
    """The rank whose node keeps a copy of this rank's state, or None where there is one node only.

    On another node, so that the copy outlives this one; outside the rank's own replicas where that
    can be, because a replica has the state already. Where nodes are of equal size every rank keeps
    one copy. Of the nodes that will do, the nearest: fewer switches are crossed.

    Args:
        nodes: By rank, the node that it is on: ranks of a node need not follow each other, as one
            may have been replaced elsewhere.
        rank: Whose copy it is.

    >>> layout = Layout(data=4, sharding="full", micro_batch=1, accumulation=1)
    >>> [neighbour_of(layout, (0, 0, 1, 1), rank) for rank in range(4)]
    [2, 3, 0, 1]
    """
    num = layout.num_ranks
    if len(set(nodes)) == 1:
        return None
    # All ranks shifted alike, each gets one copy to keep.
    holder = (rank + _shift(layout, nodes)) % num
    while nodes[holder] == nodes[rank]:  # only where nodes differ in size
        holder = (holder + 1) % num
    return holder


def _shift(layout: Layout, nodes: Sequence[int]) -> int:
    """By how much ranks are shifted so that no copy is kept by a replica, if there is such."""
    num, widest = layout.num_ranks, max(Counter(nodes).values())
    groups = replicas_of(layout)
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}

    def differ(by: Mapping[int, int] | Sequence[int], shift: int) -> bool:
        return all(by[rank] != by[(rank + shift) % num] for rank in range(num))

    shifts = [shift for shift in range(1, num) if differ(nodes, shift)]
    shifts = shifts or list(range(widest, num - widest + 1))
    return next((shift for shift in shifts if differ(group_of, shift)), (shifts or [widest])[0])


def share_of(layout: Layout, place: Coordinates) -> int:
    """Which part of a stage's and tensor rank's state it is, among the data and context ranks."""
    if layout.sharding == "none":
        return place.expert
    sharer = place.data * layout.context + place.context
    is_shared_by_all = layout.sharding != "hybrid" or layout.expert > layout.shard_degree
    return sharer if is_shared_by_all else place.shard
