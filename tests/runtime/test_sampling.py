import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime import sampling
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


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 1024, 4097])
def test_an_order_without_a_table_reads_each_sample_once_and_epochs_differ(size):
    places = np.arange(size)
    orders = [
        sampling._walked(places, seed, epoch, size) for seed, epoch in [(1, 0), (1, 1), (2, 0)]
    ]
    for order in orders:
        assert sorted(order.tolist()) == list(range(size))
    if size >= 1000:
        shares = [(a == b).mean() for a, b in itertools.combinations([places, *orders], 2)]
        assert max(shares) < 0.01  # about one in `size` is at the same place by chance
        assert abs(np.corrcoef(places, orders[0])[0, 1]) < 0.12
        assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.12


def test_large_data_has_its_order_without_a_table_and_small_data_with_one(monkeypatch):
    made = []
    monkeypatch.setattr(sampling, "_permutation", lambda *asked: made.append(asked))
    ids = sample_ids(3, range(0, 64, 2), seed=42, global_batch=64, num_samples=10**12)
    assert made == []
    assert len(set(ids.tolist())) == 32
    assert ids.max() < 10**12
    with pytest.raises(TypeError):
        sample_ids(3, range(4), seed=42, global_batch=4, num_samples=2**24)
    assert made == [(42, 0, 2**24)]


def test_the_order_of_large_data_is_this_one_for_ever():
    ids = sample_ids(7, range(4), seed=42, global_batch=4, num_samples=2**24 + 1)
    assert ids.tolist() == IDS_OF_LARGE_DATA


IDS_OF_LARGE_DATA = [1409049, 10837287, 5288031, 5244729]
