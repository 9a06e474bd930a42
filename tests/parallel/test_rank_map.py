"""Which rank does which part of the work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import (
    AXES,
    coordinates,
    groups,
    num_nodes_of,
    rank_map,
    rank_of,
)

BIG = Layout(data=2, sharding="zero1", micro_batch=1, accumulation=16, tensor=8, pipeline=4)
"""64 ranks: tensor 8, pipeline 4, data 2."""

degrees = st.integers(1, 4)
layouts = st.builds(
    Layout,
    data=degrees,
    sharding=st.sampled_from(["none", "full"]),
    micro_batch=st.just(1),
    accumulation=st.just(1),
    tensor=degrees,
    context=degrees,
    pipeline=degrees,
)


def test_s1_8_64_ranks_as_tensor_8_pipeline_4_data_2():
    places = list(rank_map(BIG))
    assert len(places) == 64
    assert [place.tensor for place in places[:9]] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert (places[8].data, places[8].pipeline) == (1, 0)
    assert (places[16].data, places[16].pipeline) == (0, 1)
    assert (places[63].tensor, places[63].data, places[63].pipeline) == (7, 1, 3)


def test_a_tensor_group_stays_inside_its_node():
    assert [num_nodes_of(group, 8) for group in groups(BIG, "tensor")] == [1] * 8


def test_groups_of_64_ranks_have_the_sizes_of_their_axes():
    sizes = {axis: {len(group) for group in groups(BIG, axis)} for axis in AXES}
    assert sizes == {"tensor": {8}, "context": {1}, "data": {2}, "pipeline": {4}}
    assert groups(BIG, "pipeline")[0] == (0, 16, 32, 48)
    assert groups(BIG, "data")[0] == (0, 8)


@given(layouts)
def test_every_place_leads_back_to_its_rank(layout: Layout):
    for rank in range(layout.num_ranks):
        place = coordinates(layout, rank)
        axes = {axis: getattr(place, axis) for axis in AXES}
        assert rank_of(layout, **axes) == rank


@given(layouts, st.sampled_from([*AXES, "shard", "expert"]))
def test_every_rank_is_in_exactly_one_group_of_an_axis(layout: Layout, axis: str):
    members = [rank for group in groups(layout, axis) for rank in group]
    assert sorted(members) == list(range(layout.num_ranks))


def test_hybrid_sharding_shares_inside_and_copies_between():
    layout = Layout(data=8, sharding="hybrid", shard=4, micro_batch=1, accumulation=1)
    assert groups(layout, "shard") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert coordinates(layout, 6).shard == 2
    assert coordinates(layout, 6).replica == 1


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank 64 is not one of 0 to 63"):
        coordinates(BIG, 64)


def test_an_axis_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'width' is not an axis"):
        groups(BIG, "width")
