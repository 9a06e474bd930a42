import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.parallel.layout import Layout
from paceline.runtime import sampling
from paceline.runtime.sampling import Mixture, batch_digest, rank_slots, sample_ids


def split(world: int, global_batch: int, micro_batch: int) -> Layout:
    accumulation = global_batch // world // micro_batch
    return Layout(data=world, sharding="none", micro_batch=micro_batch, accumulation=accumulation)


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
            for slots in rank_slots(split(world, global_batch, micro_batch), rank):
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
        slots = [s for rank in range(world) for s in rank_slots(split(world, 12, 2), rank)]
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
    slots = rank_slots(split(3, 12, 2), rank)
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


mixtures = st.lists(
    st.tuples(st.integers(10, 60), st.floats(0.001, 1)), min_size=2, max_size=5
).map(lambda pairs: Mixture(sizes=tuple(p[0] for p in pairs), weights=tuple(p[1] for p in pairs)))


def drawn(mixture, num_positions, seed=3):
    return sample_ids(0, range(num_positions), seed=seed, global_batch=1, num_samples=mixture)


@given(mixture=mixtures, seed=st.integers(0, 2**70))
@settings(deadline=None, max_examples=30)
def test_every_source_of_a_mixture_reads_each_sample_once_an_epoch(mixture, seed):
    ids = drawn(mixture, 600, seed)
    starts = np.cumsum([0, *mixture.sizes])
    for start, size in zip(starts, mixture.sizes, strict=False):
        own = ids[(ids >= start) & (ids < start + size)] - start
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


@given(mixture=mixtures, num_blocks=st.integers(1, 10**9))
def test_weights_are_kept_at_the_edges_of_blocks(mixture, num_blocks):
    before, due = (sampling._due(edge * 1024, mixture) for edge in (num_blocks - 1, num_blocks))
    wanted = np.array(mixture.weights) / sum(mixture.weights) * num_blocks * 1024
    assert due.sum() == num_blocks * 1024
    assert np.abs(due - wanted).max() <= len(mixture.sizes) / 2 + 0.5
    assert (due >= before).all()


def test_a_block_has_as_many_of_each_source_as_are_due():
    mixture = Mixture(sizes=(100, 50, 7), weights=(2, 1, 0.5))
    ids = drawn(mixture, 3 * 1024)
    counts = np.bincount(np.searchsorted(np.cumsum(mixture.sizes), ids, side="right"))
    assert counts.tolist() == sampling._due(3 * 1024, mixture).tolist()


@given(
    mixture=mixtures,
    world=st.sampled_from([1, 2, 3, 4, 6, 12]),
    micro_batch=st.sampled_from([1, 2, 4]),
    step=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=30)
def test_a_step_of_a_mixture_reads_the_same_samples_on_any_ranks(mixture, world, micro_batch, step):
    options = {"seed": 3, "global_batch": 48, "num_samples": mixture}
    slots = [s for rank in range(world) for s in rank_slots(split(world, 48, micro_batch), rank)]
    ids = np.concatenate([sample_ids(step, part, **options) for part in slots])
    assert ids.tolist() == sample_ids(step, range(48), **options).tolist()
    # The run in one go, of which this step is a part.
    assert ids.tolist() == sample_ids(0, range(step * 48, step * 48 + 48), **options).tolist()


def test_a_source_of_a_ten_thousandth_gets_its_turn():
    mixture = Mixture(sizes=(5000, 700, 90, 40), weights=(0.7, 0.2, 0.0999, 0.0001))
    ids = drawn(mixture, 20480)
    assert (ids >= 5790).sum() == 2


def test_epochs_and_sources_of_one_size_have_orders_of_their_own():
    ids = drawn(Mixture(sizes=(64, 64), weights=(1, 1)), 4096)
    orders = [ids[ids < 64][:64], ids[ids < 64][64:128], ids[ids >= 64][:64] - 64]
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_a_mixture_of_a_billion_samples_needs_no_table(monkeypatch):
    monkeypatch.setattr(sampling, "_permutation", None)
    ids = drawn(Mixture(sizes=(10**9, 10**9), weights=(2, 1)), 64)
    assert len(set(ids.tolist())) == 64


def test_the_order_of_a_mixture_is_this_one_for_ever():
    mixture = Mixture(sizes=(100, 50, 7), weights=(2, 1, 0.5))
    ids = sample_ids(7, range(6), seed=42, global_batch=6, num_samples=mixture)
    assert ids.tolist() == IDS_OF_A_MIXTURE


IDS_OF_A_MIXTURE = [10, 26, 78, 156, 115, 70]


@given(world=st.integers(1, 9), batch=st.integers(9, 40), micro_batch=st.integers(1, 8))
def test_s1_16_unequal_shares_are_every_slot_once_in_micro_batches_that_never_grow(
    world, batch, micro_batch
):
    whole = Layout(data=batch, sharding="none", micro_batch=1, accumulation=1)
    most = -(-batch // world)
    layout = replace(
        whole,
        data=world,
        accumulation=-(-most // micro_batch),
        micro_batch=micro_batch,
        batch=batch,
    )
    sizes = [layout.micro_batches_of(rank) for rank in range(world)]
    assert {len(each) for each in sizes} == {layout.accumulation}
    assert max(map(max, sizes)) <= micro_batch
    totals = [sum(each) for each in sizes]
    assert sum(totals) == batch
    assert max(totals) - min(totals) <= 1
    read = [
        slot
        for rank in range(world)
        for slots, size in zip(rank_slots(layout, rank), sizes[rank], strict=True)
        for slot in slots
        if size
    ]
    assert read == list(range(batch))
