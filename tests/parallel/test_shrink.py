"""The same training on fewer ranks."""

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.choices import Sharding
from paceline.parallel.layout import Layout
from paceline.parallel.replicas import replicas_of
from paceline.parallel.shrink import part_of, rounding_bound, shrunk
from paceline.runtime.sampling import rank_slots

DDP = Layout(data=4, sharding="none", micro_batch=2, accumulation=3)
HSDP = Layout(data=4, sharding="hybrid", shard=2, micro_batch=1, accumulation=1)


@given(
    data=st.integers(1, 8),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 6),
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2]),
    sharding=st.sampled_from(["none", "zero1", "full"]),
    fewer=st.integers(0, 31),
)
def test_a_smaller_layout_keeps_the_global_batch_and_the_model_parallel_axes(
    data: int,
    micro_batch: int,
    accumulation: int,
    tensor: int,
    pipeline: int,
    sharding: Sharding,
    fewer: int,
) -> None:
    layout = Layout(
        data=data,
        sharding=sharding,
        micro_batch=micro_batch,
        accumulation=accumulation,
        tensor=tensor,
        pipeline=pipeline,
    )
    small = shrunk(layout, fewer)
    if small is None:
        assert fewer < layout.num_ranks
        return
    assert small.num_ranks <= fewer
    assert small.global_batch == layout.global_batch
    assert small.micro_batch <= layout.micro_batch
    assert (small.tensor, small.pipeline) == (tensor, pipeline)


@pytest.mark.parametrize("change", [{}, {"sharding": "hybrid", "shard": 2}])
def test_s1_16_gradients_that_were_reduced_at_once_stay_sharded_on_fewer_ranks(change):
    one = replace(Layout(data=4, sharding="full", micro_batch=2, accumulation=1), **change)
    small = shrunk(one, 3)
    assert small is not None
    assert (small.accumulation, small.reduce_every_micro_batch) == (2, True)
    waits = shrunk(replace(one, accumulation=2), 3)
    assert waits is not None
    assert not waits.reduce_every_micro_batch


@given(data=st.integers(1, 8), fewer=st.integers(1, 8), micro_batch=st.integers(1, 3))
def test_the_samples_of_a_step_are_the_same_in_the_same_order_of_slots(data, fewer, micro_batch):
    layout = Layout(data=data, sharding="none", micro_batch=micro_batch, accumulation=2)
    small = shrunk(layout, fewer)
    assert small is not None

    def slots(one: Layout) -> list[int]:
        parts = [
            part
            for rank in range(one.data)
            for part, size in zip(rank_slots(one, rank), one.micro_batches_of(rank), strict=True)
            if size
        ]
        return [slot for part in parts for slot in part]

    assert slots(small) == slots(layout) == list(range(layout.global_batch))


def test_s1_16_a_batch_that_does_not_divide_is_shared_unequally_by_all_who_live():
    small = shrunk(replace(DDP, micro_batch=1, accumulation=2), 3)
    assert small is not None
    assert (small.data, small.accumulation, small.global_batch) == (3, 3, 8)
    shares = [small.micro_batches_of(rank) for rank in range(3)]
    assert shares == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]


def test_s1_16_stages_of_a_pipeline_keep_micro_batches_of_one_size():
    layout = replace(DDP, micro_batch=1, accumulation=2, pipeline=2)
    small = shrunk(layout, 7)
    assert small is not None
    assert (small.data, small.accumulation, small.batch) == (2, 4, None)


@given(
    data=st.integers(1, 12),
    micro_batch=st.integers(1, 5),
    accumulation=st.integers(1, 5),
    sharding=st.sampled_from(["none", "zero1", "zero2", "full"]),
    lost=st.integers(1, 11),
)
def test_s1_16_any_number_of_ranks_that_live_goes_on(
    data, micro_batch, accumulation, sharding, lost
):
    layout = Layout(
        data=data, sharding=sharding, micro_batch=micro_batch, accumulation=accumulation
    )
    left = data - lost
    small = shrunk(layout, left)
    if left < 1:
        assert small is None
        return
    assert small is not None
    assert (small.data, small.global_batch) == (left, layout.global_batch)
    # No rank does more micro-batches than the largest share of samples takes.
    assert small.accumulation == ceil(ceil(layout.global_batch / left) / micro_batch)


@given(
    data=st.integers(1, 8),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    pipeline=st.sampled_from([1, 2]),
    lost=st.integers(1, 7),
)
def test_s1_16_a_batch_that_shrinks_leaves_the_micro_batches_of_each_rank_alone(
    data, micro_batch, accumulation, pipeline, lost
):
    layout = replace(
        DDP, data=data, micro_batch=micro_batch, accumulation=accumulation, pipeline=pipeline
    )
    left = data - lost
    small = shrunk(layout, max(0, left) * pipeline, "shrink")
    assert small == (replace(layout, data=left) if left > 0 else None)


def test_a_model_that_is_split_over_more_ranks_than_live_cannot_shrink():
    assert shrunk(replace(DDP, data=1, tensor=4), 3) is None


def test_enough_ranks_change_nothing():
    assert shrunk(DDP, 9) == DDP


def test_one_whole_copy_of_hybrid_sharding_is_full_sharding_with_the_same_parts():
    small = shrunk(HSDP, 2)
    assert small is not None
    assert (small.sharding, small.shard) == ("full", None)
    assert {part_of(small, rank) for rank in range(2)} == {part_of(HSDP, 2), part_of(HSDP, 3)}


def test_shards_of_fewer_ranks_are_other_parts():
    full = replace(HSDP, sharding="full", shard=None)
    small = shrunk(full, 2)
    assert small is not None
    assert not {part_of(small, rank) for rank in range(2)} & {part_of(full, r) for r in range(4)}


@pytest.mark.parametrize("layout", [DDP, HSDP, replace(DDP, tensor=2, sharding="full")])
def test_ranks_of_one_layout_hold_the_same_part_exactly_when_they_are_replicas(layout):
    found: dict[object, list[int]] = {}
    for rank in range(layout.num_ranks):
        found.setdefault(part_of(layout, rank), []).append(rank)
    assert sorted(map(tuple, found.values())) == sorted(replicas_of(layout))


def test_the_bound_on_rounding_is_of_the_size_of_the_batch():
    assert rounding_bound(8, 2.0**-24) == pytest.approx(14 * 2.0**-24)
