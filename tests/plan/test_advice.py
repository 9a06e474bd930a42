"""Small answers from a few numbers."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.choices import Optimizer
from paceline.plan.advice import (
    advise_buckets,
    advise_checkpoints,
    critical_batch,
    find_batch,
    scale_learning_rate,
    solve_batch,
)

HOUR = 3600.0
MIB = 2**20


def test_s0_6_64_is_8_at_once_4_accumulated_on_2_ranks():
    split = solve_batch(64, data_ranks=2, max_micro_batch=8)
    assert (split.micro_batch, split.accumulation, split.achieved_batch) == (8, 4, 64)
    assert split.nearest == ()
    assert split.explanation == "64 = 8 a micro-batch x 4 accumulated x 2 ranks"


def test_s0_6_a_batch_that_does_not_divide_is_rounded_to_the_nearest_and_says_so():
    split = solve_batch(103, data_ranks=8, max_micro_batch=4)
    assert split.nearest == (96, 104)
    assert split.rounding_error == pytest.approx(1 / 103)
    assert split.micro_batch == 1


def test_s0_6_of_two_batches_as_near_the_one_with_the_larger_micro_batch_is_taken():
    split = solve_batch(100, data_ranks=8, max_micro_batch=8)
    assert split.nearest == (96, 104)
    assert (split.achieved_batch, split.micro_batch, split.accumulation) == (96, 6, 2)
    assert split.rounding_error == pytest.approx(-0.04)
    assert split.explanation.startswith("100 does not divide by 8 ranks: 12.50 samples each")


def test_a_micro_batch_that_does_not_divide_is_explained():
    split = solve_batch(14, data_ranks=2, max_micro_batch=6)
    assert split.micro_batch == 1
    assert "6 would fit at once" in split.explanation


def test_fewer_samples_than_ranks_become_one_each():
    split = solve_batch(3, data_ranks=8, max_micro_batch=4)
    assert (split.achieved_batch, split.nearest) == (8, (8,))


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(1, 64))
def test_a_split_multiplies_to_the_batch_that_it_says(batch: int, ranks: int, most: int):
    split = solve_batch(batch, data_ranks=ranks, max_micro_batch=most)
    assert split.micro_batch * split.accumulation * ranks == split.achieved_batch
    assert split.micro_batch <= most
    assert abs(split.achieved_batch - batch) < ranks
    assert (split.achieved_batch == batch) == (batch % ranks == 0)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="the data ranks is 0"):
        solve_batch(8, data_ranks=0, max_micro_batch=1)


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.008), ("adamw", 0.00283)])
def test_s1_3_eight_times_the_batch_scales_the_rate_by_the_optimizers_rule(optimizer, rate):
    scaled = scale_learning_rate(0.001, base_batch=64, batch=512, optimizer=optimizer)
    assert scaled.learning_rate == pytest.approx(rate, rel=1e-3)
    assert scaled.linear_rate == pytest.approx(0.008)
    assert scaled.sqrt_rate == pytest.approx(0.00283, rel=1e-3)


def test_the_rate_of_half_the_document_is_that_of_256_samples():
    scaled = scale_learning_rate(0.001, base_batch=64, batch=256, optimizer="sgd")
    assert scaled.learning_rate == pytest.approx(0.004)


def test_s1_3_warm_up_is_five_epochs_and_a_tenth_of_the_run_at_most():
    case = {"base_batch": 64, "batch": 512, "optimizer": "sgd", "samples": 51_200}
    assert scale_learning_rate(0.1, **case, steps=10_000).warmup_steps == 500
    assert scale_learning_rate(0.1, **case, steps=2_000).warmup_steps == 200
    assert scale_learning_rate(0.1, base_batch=64, batch=512, optimizer="sgd").warmup_steps is None


def test_every_optimizer_of_a_job_has_a_rule():
    for optimizer in get_args(Optimizer):
        assert scale_learning_rate(0.1, base_batch=1, batch=4, optimizer=optimizer).reason


def test_a_smaller_batch_needs_no_warm_up():
    scaled = scale_learning_rate(0.1, base_batch=64, batch=32, optimizer="sgd", steps=100)
    assert scaled.warmup_steps == 0


def test_an_optimizer_without_a_rule_is_refused_with_those_that_have_one():
    with pytest.raises(ValueError, match="known are sgd, adam, adamw"):
        scale_learning_rate(0.1, base_batch=1, batch=2, optimizer="lion")


@given(st.integers(0, 3000), st.integers(1, 64), st.integers(64, 4096))
def test_s4_8_the_batch_finder_finds_the_largest_that_fits(edge: int, start: int, limit: int):
    found = find_batch(lambda batch: batch <= edge, start=start, limit=limit, margin=0)
    assert found.largest == found.chosen == min(edge, limit)
    assert found.at_limit == (edge >= limit)
    assert len(found.tried) == len(dict(found.tried)) <= 30


def test_s4_8_the_batch_finder_leaves_a_margin_free():
    found = find_batch(lambda batch: batch <= 100, margin=0.1)
    assert (found.largest, found.chosen) == (100, 90)


def test_the_batch_finder_says_when_nothing_fits():
    found = find_batch(lambda batch: False, start=8)
    assert (found.largest, found.chosen) == (0, 0)


def test_s1_2_large_jobs_want_larger_buckets_than_the_default():
    advice = advise_buckets(
        gradient_bytes=500 * 10**6, backward_s=0.1, ranks=64, bytes_per_s=12.5e9, latency_s=20e-6
    )
    assert advice.bucket_cap_mb is not None
    assert advice.bucket_cap_mb > 25
    assert advice.exposed_s < advice.default_exposed_s < advice.whole_exposed_s
    assert "does not cause the overlap" in advice.flags["gradient_as_bucket_view"]


def test_a_reduction_that_is_hidden_anyway_keeps_the_default():
    advice = advise_buckets(
        gradient_bytes=100 * 10**6, backward_s=1.0, ranks=8, bytes_per_s=300e9, latency_s=5e-6
    )
    assert advice.bucket_cap_mb is None
    assert advice.reason.startswith("leave it out")


def test_s1_2_gradients_of_any_size_are_priced_in_no_time():
    advice = advise_buckets(
        gradient_bytes=10**39, backward_s=3600.0, ranks=2, bytes_per_s=1e12, latency_s=2e-5
    )
    assert advice.reduce_s == pytest.approx(10**39 / 1e12, rel=0.01)


@given(st.integers(2 * MIB, 400 * MIB), st.floats(0, 2), st.integers(2, 300), st.floats(1e7, 1e12))
def test_s1_2_the_exposed_time_is_that_of_buckets_reduced_one_after_another(
    gradients: int, backward_s: float, ranks: int, bytes_per_s: float
):
    latency_s, size = 2e-5, 25 * MIB
    count = -(-(gradients - MIB) // size)
    clock = ready = 0.0
    for bucket in [MIB] + [(gradients - MIB) / count] * count:
        ready += bucket
        reduce_s = 2 * (ranks - 1) * (latency_s + bucket / ranks / bytes_per_s)
        clock = max(clock, backward_s * ready / gradients) + reduce_s
    advice = advise_buckets(
        gradient_bytes=gradients,
        backward_s=backward_s,
        ranks=ranks,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s,
    )
    assert advice.default_exposed_s == pytest.approx(clock - backward_s, rel=1e-6, abs=1e-9)


def test_one_rank_reduces_nothing():
    advice = advise_buckets(
        gradient_bytes=10**9, backward_s=1.0, ranks=1, bytes_per_s=1e9, latency_s=1e-5
    )
    assert (advice.bucket_cap_mb, advice.exposed_s, advice.reduce_s) == (None, 0, 0)


def test_a_model_whose_parameters_change_is_told_to_look_for_unused_ones():
    advice = advise_buckets(
        gradient_bytes=1, backward_s=1.0, ranks=2, bytes_per_s=1e9, latency_s=0, static=False
    )
    assert advice.flags["static_graph"].startswith("False")
    assert advice.flags["find_unused_parameters"].startswith("True")


def test_s1_14_16384_ranks_save_more_often_than_the_rule_of_thumb():
    advice = advise_checkpoints(save_s=30, restart_s=600, ranks=16_384, step_s=10)
    assert advice.mtbf_s == pytest.approx(3.09 * HOUR, rel=0.01)
    assert advice.interval_s < 1800
    assert advice.every_steps == round(advice.interval_s / 10)
    assert advice.goodput.useful > max(each.useful for each in advice.rule_of_thumb)
    assert advice.pessimistic.useful < advice.goodput.useful
    assert "2407.21783" in advice.mtbf_source


def test_a_save_waits_until_the_last_one_is_written_and_says_both():
    advice = advise_checkpoints(
        save_s=0.03, restart_s=600, ranks=16_384, step_s=7, background_s=1000
    )
    assert advice.every_steps == 143
    assert "30 ms for a save (the copy to the host), then 16m 40s of writing" in advice.reason
    assert "bounds the interval" in advice.reason
    quick = advise_checkpoints(save_s=30, restart_s=600, ranks=16_384, background_s=100)
    assert "1m 40s of writing" in quick.reason
    assert "bounds" not in quick.reason


def test_s1_14_eight_ranks_save_far_less_often():
    advice = advise_checkpoints(save_s=30, restart_s=600, ranks=8)
    assert advice.interval_s > 3 * HOUR


def test_a_time_between_failures_of_your_own_is_declared():
    advice = advise_checkpoints(save_s=30, restart_s=600, ranks=100, rank_mtbf_s=100 * HOUR)
    assert advice.mtbf_s == HOUR
    assert advice.mtbf_source == "declared"


def test_the_noise_scale_comes_back_from_norms_made_with_it():
    square, noise = 4.0, 4000.0
    found = critical_batch(
        small_batch=32,
        small_square=square + noise / 32,
        big_batch=1024,
        big_square=square + noise / 1024,
    )
    assert found is not None
    assert found.samples == pytest.approx(1000)
    assert found.steps_ratio(1000) == found.samples_ratio(1000) == pytest.approx(2)


def test_norms_too_noisy_to_tell_give_no_critical_batch():
    assert critical_batch(small_batch=1, small_square=1, big_batch=2, big_square=5) is None


def test_s1_14_a_save_that_lasts_longer_than_failures_are_apart_is_warned_of():
    hour_apart = {"ranks": 100, "rank_mtbf_s": 100 * HOUR}
    advice = advise_checkpoints(save_s=60, background_s=HOUR, restart_s=600, **hour_apart)
    assert advice.warning is not None
    assert advice.warning.startswith("a checkpoint takes 1h 01m, failures are 1h 00m apart")
    long = advise_checkpoints(save_s=4 * HOUR, restart_s=600, **hour_apart)
    assert "at most 1.83% end before the next failure" in long.warning  # exp(-4)
    assert "a restart takes 2h" in str(
        advise_checkpoints(save_s=60, restart_s=2 * HOUR, **hour_apart).warning
    )
    assert advise_checkpoints(save_s=60, restart_s=600, **hour_apart).warning is None
