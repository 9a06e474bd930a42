"""Which rank does which part of the work, and which ranks talk to each other.

Ranks are counted innermost axis first: tensor, context, data, and pipeline outermost. So the ranks
of a tensor group are neighbours, on one node whenever the group is not larger than the node, and
the rarest talk, from stage to stage, crosses the network. Experts are shared inside the data and
context ranks and have no axis of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.parallel.layout import Layout

AXES = ("tensor", "context", "data", "pipeline")
"""Innermost first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on every axis, each counted from 0."""

    rank: int
    tensor: int
    context: int
    data: int
    pipeline: int

    expert: int
    """Which share of the routed experts it holds."""

    shard: int
    """Which shard of parameters or optimizer state it holds; 0 without sharding."""

    replica: int
    """Which whole copy its shard belongs to."""


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """A rank's place.

    Raises:
        ValueError: There is no such rank.

    >>> layout = Layout(data=2, sharding="none", micro_batch=1, accumulation=8, tensor=8,
    ...     pipeline=4)
    >>> place = coordinates(layout, 27)
    >>> place.tensor, place.data, place.pipeline
    (3, 1, 1)
    """
    if not 0 <= rank < layout.num_ranks:
        raise ValueError(f"rank {rank} is not one of 0 to {layout.num_ranks - 1}")
    rest, tensor = divmod(rank, layout.tensor)
    rest, context = divmod(rest, layout.context)
    pipeline, data = divmod(rest, layout.data)
    sharer = data * layout.context + context
    return Coordinates(
        rank=rank,
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        expert=sharer % layout.expert,
        shard=sharer % layout.shard_degree,
        replica=sharer // layout.shard_degree,
    )


def rank_of(
    layout: Layout, *, tensor: int = 0, context: int = 0, data: int = 0, pipeline: int = 0
) -> int:
    """The rank at a place: `coordinates` backwards."""
    inner = (pipeline * layout.data + data) * layout.context + context
    return inner * layout.tensor + tensor


def rank_map(layout: Layout) -> Iterator[Coordinates]:
    """Every rank's place, in order."""
    return (coordinates(layout, rank) for rank in range(layout.num_ranks))


def peers_of(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Ranks that do the same work, so that their speeds can be compared: those of one stage.

    >>> layout = Layout(data=2, sharding="none", micro_batch=1, accumulation=2, pipeline=2)
    >>> peers_of(layout)
    ((0, 1), (2, 3))
    """
    per_stage = layout.num_ranks // layout.pipeline
    return tuple(
        tuple(range(stage * per_stage, (stage + 1) * per_stage)) for stage in range(layout.pipeline)
    )


def groups(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """Ranks that differ only along an axis: each group is one communicator.

    Args:
        layout: As chosen.
        axis: One of `AXES`; or `shard`, the ranks that share one copy of the state; or `expert`,
            the ranks that share the routed experts.

    >>> layout = Layout(data=2, sharding="full", micro_batch=1, accumulation=1, tensor=2)
    >>> groups(layout, "tensor"), groups(layout, "data")
    ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for place in rank_map(layout):
        if axis == "shard":
            key = (place.tensor, place.pipeline, place.replica)
        elif axis == "expert":
            sharer = place.data * layout.context + place.context
            key = (place.tensor, place.pipeline, sharer // layout.expert)
        else:
            key = tuple(getattr(place, other) for other in AXES if other != axis)
            if axis not in AXES:
                raise ValueError(f"{axis!r} is not an axis; they are {', '.join(AXES)}")
        found.setdefault(key, []).append(place.rank)
    return [tuple(ranks) for ranks in found.values()]


def num_nodes_of(group: tuple[int, ...], ranks_per_node: int) -> int:
    """Nodes that a group's ranks are on.

    >>> num_nodes_of((0, 8), 8)
    2
    """
    return len({rank // ranks_per_node for rank in group})
