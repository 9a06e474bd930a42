"""Which ranks hold the same state, and who keeps a copy of whose."""

from itertools import product

import pytest

from paceline.choices import Sharding
from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import coordinates
from paceline.parallel.replicas import neighbour_of, replicas_of


def layout_of(sharding: Sharding = "none", *, data: int = 1, **degrees: int) -> Layout:
    return Layout(data=data, sharding=sharding, micro_batch=1, accumulation=1, **degrees)


EVERY_LAYOUT = [
    Layout(
        data=data,
        sharding=sharding,
        shard=shard if sharding == "hybrid" else None,
        micro_batch=1,
        accumulation=1,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
    )
    for data, tensor, context, pipeline in product((1, 2, 3, 4, 8), (1, 2), (1, 2), (1, 2))
    for sharding in ("none", "zero1", "zero2", "full", "hybrid")
    for shard, expert in product((1, 2, 4), (1, 2, 4, 8))
    if (sharding == "hybrid" or shard == 1)
    and (data * context) % shard == 0
    and (data * context) % expert == 0
]
"""Up to 64 ranks."""


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (layout_of(data=4), [(0, 1, 2, 3)]),
        (layout_of(data=2, tensor=2), [(0, 2), (1, 3)]),
        (layout_of(data=2, context=2), [(0, 1, 2, 3)]),
        (layout_of(data=2, pipeline=2), [(0, 1), (2, 3)]),
        (layout_of(data=4, expert=2), [(0, 2), (1, 3)]),
        (layout_of(data=4, expert=4), [(0,), (1,), (2,), (3,)]),
        (layout_of("zero1", data=4), [(0,), (1,), (2,), (3,)]),
        (layout_of("full", data=2, tensor=2), [(0,), (1,), (2,), (3,)]),
        (layout_of("full", tensor=2), [(0,), (1,)]),
        (layout_of("hybrid", data=4, shard=2), [(0, 2), (1, 3)]),
        (layout_of("hybrid", data=4, shard=2, expert=2), [(0, 2), (1, 3)]),
        (layout_of("hybrid", data=4, shard=2, expert=4), [(0,), (1,), (2,), (3,)]),
        (layout_of("hybrid", data=4, shard=4), [(0,), (1,), (2,), (3,)]),
        (layout_of("hybrid", data=4, shard=1), [(0, 1, 2, 3)]),
    ],
)
def test_replicas_are_the_ranks_that_hold_the_same(layout: Layout, groups: list[tuple[int, ...]]):
    assert replicas_of(layout) == tuple(groups)


def test_every_rank_is_in_one_group_of_one_stage_and_tensor_place():
    for layout in EVERY_LAYOUT:
        groups = replicas_of(layout)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.num_ranks))
        assert len({len(group) for group in groups}) == 1
        for group in groups:
            places = [coordinates(layout, rank) for rank in group]
            assert len({(p.pipeline, p.tensor, p.expert, p.shard) for p in places}) == 1, layout
            assert len({(p.data, p.context) for p in places}) == len(group)


def of_node(num: int, ranks_per_node: int) -> list[int]:
    """The node of each rank, where they follow each other."""
    return [rank // ranks_per_node for rank in range(num)]


@pytest.mark.parametrize("nodes", [(0, 1, 1, 0), (0, 0, 1, 0), (2, 1, 1, 2), (0, 1, 2, 1)])
def test_a_copy_lies_on_another_node_too_where_a_rank_was_replaced_elsewhere(nodes):
    for layout in (each for each in EVERY_LAYOUT if each.num_ranks == 4):
        for rank in range(4):
            holder = neighbour_of(layout, nodes, rank)
            assert holder is not None
            assert nodes[holder] != nodes[rank]


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 8])
def test_a_copy_lies_on_another_node_and_every_rank_keeps_one(ranks_per_node: int):
    for layout in EVERY_LAYOUT:
        num = layout.num_ranks
        holders = [neighbour_of(layout, of_node(num, ranks_per_node), rank) for rank in range(num)]
        if num <= ranks_per_node:
            assert holders == [None] * num
            continue
        nodes = [(rank // ranks_per_node, holder) for rank, holder in enumerate(holders)]
        assert all(holder is not None and holder // ranks_per_node != n for n, holder in nodes)
        if num % ranks_per_node == 0:
            assert sorted(holders, key=str) == sorted(range(num), key=str)


def test_a_copy_is_kept_outside_the_replicas_where_there_is_such_a_rank():
    layout = layout_of("hybrid", data=8, shard=2)
    # Two ranks on, on the next node, is the same shard's replica; three ranks on is the other's.
    assert [neighbour_of(layout, of_node(8, 2), rank) for rank in (0, 1, 6, 7)] == [3, 4, 1, 2]
    stages = layout_of(data=2, pipeline=2)
    for rank in range(4):
        same = next(group for group in replicas_of(stages) if rank in group)
        assert neighbour_of(stages, of_node(4, 1), rank) not in same


def test_where_only_replicas_are_on_another_node_one_of_them_keeps_the_copy():
    assert [neighbour_of(layout_of(data=4), of_node(4, 2), rank) for rank in range(4)] == [
        2,
        3,
        0,
        1,
    ]
    two_nodes = layout_of("hybrid", data=8, shard=4)
    assert [neighbour_of(two_nodes, of_node(8, 4), rank) for rank in (0, 3, 4, 7)] == [4, 7, 0, 3]
