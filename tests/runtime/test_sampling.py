from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.sampling import batch_digest, rank_slots, sample_ids


@given(
    num_samples=st.integers(1, 50),
    micro_batch=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 4),
    seed=st.integers(0, 2**70),
    num_epochs=st.integers(1, 3),
)
def test_every_epoch_reads_each_sample_exactly_once_over_all_ranks(
    num_samples, micro_batch, accumulation, world, seed, num_epochs
):
    global_batch = micro_batch * accumulation * world
    read = []
    for step in range(-(-num_samples * num_epochs // global_batch)):
        for rank in range(world):
            for slots in rank_slots(rank, world, global_batch, micro_batch):
                assert len(slots) == micro_batch
                read += sample_ids(
                    step, slots, seed=seed, global_batch=global_batch, num_samples=num_samples
                ).tolist()
    for epoch in range(num_epochs):
        part = read[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(num_samples))


@given(world=st.sampled_from([1, 2, 3, 6]), step=st.integers(0, 10**6))
def test_a_step_reads_the_same_samples_on_any_number_of_ranks(world, step):
    def ids(world):
        slots = [s for rank in range(world) for s in rank_slots(rank, world, 12, 2)]
        parts = [sample_ids(step, s, seed=3, global_batch=12, num_samples=1000) for s in slots]
        return np.concatenate(parts).tolist()

    assert ids(world) == ids(1)


def test_a_batch_larger_than_the_data_reads_each_sample_about_as_often():
    ids = sample_ids(0, range(10), seed=0, global_batch=10, num_samples=4)
    assert sorted(Counter(ids.tolist()).values()) == [2, 2, 3, 3]


def test_epochs_and_seeds_have_orders_of_their_own():
    def epoch(number, seed):
        return sample_ids(number, range(64), seed=seed, global_batch=64, num_samples=64).tolist()

    orders = [epoch(0, 0), epoch(1, 0), epoch(0, 1), epoch(1, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_this_one_for_ever():
    # A change here makes every resumed run read other samples than it would have.
    ids = sample_ids(7, range(6), seed=42, global_batch=6, num_samples=100)
    assert ids.tolist() == IDS_OF_SEED_42_STEP_7
    assert batch_digest(7, seed=42, global_batch=6, num_samples=100) == DIGEST_OF_THEM


def test_the_digest_of_a_batch_is_another_for_another_step_or_seed():
    options = {"global_batch": 8, "num_samples": 1000}
    digests = {batch_digest(step, seed=seed, **options) for step in (0, 1) for seed in (0, 1)}
    assert len(digests) == 4


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_slots_of_a_rank_lie_side_by_side(rank):
    slots = rank_slots(rank, 3, 12, 2)
    assert [slot for part in slots for slot in part] == list(range(rank * 4, rank * 4 + 4))


IDS_OF_SEED_42_STEP_7 = [64, 5, 26, 68, 82, 84]
DIGEST_OF_THEM = "c15b634259fbf88e"
