"""Slow ranks, named from the times of steps made up here."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.stragglers import (
    LossOutliers,
    Straggler,
    Stragglers,
    log_ratios,
    worth_evicting,
)


def named(
    slow: dict[int, float],
    *,
    num_ranks: int = 4,
    num_steps: int = 20,
    noise: float = 0.05,
    seed: int = 0,
) -> list[Straggler]:
    draw = np.random.default_rng(seed)
    factors = np.array([slow.get(rank, 1.0) for rank in range(num_ranks)])
    stragglers = Stragglers([range(num_ranks)])
    found = []
    for _ in range(num_steps):
        found += stragglers.add((factors * draw.lognormal(0.0, noise, num_ranks)).tolist())
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 64])
def test_s4_12_a_rank_one_and_a_half_times_as_slow_is_named_within_20_steps(num_ranks: int):
    for seed in range(20):
        (one,) = named({1: 1.5}, num_ranks=num_ranks, seed=seed)
        assert one.rank == 1
        assert one.factor == pytest.approx(1.5, rel=0.1)


def test_s4_12_two_slow_ranks_of_eight_are_both_named():
    assert {one.rank for one in named({1: 1.5, 6: 2.0}, num_ranks=8)} == {1, 6}


def test_a_rank_is_named_once_while_it_stays_slow():
    assert len(named({2: 1.5}, num_steps=500)) == 1


def test_a_rank_that_caught_up_and_fell_behind_again_is_named_again():
    stragglers = Stragglers([range(4)])
    found = []
    for factor in (1.5, 1.0, 1.5):
        for _ in range(100):
            found += stragglers.add([1.0, factor, 1.0, 1.0])
    assert [one.rank for one in found] == [1, 1]


def test_one_long_step_in_ten_is_not_a_slow_rank():
    stragglers = Stragglers([range(4)])
    assert not any(stragglers.add([1.0, 10.0 if n % 10 == 0 else 1.0, 1.0, 1.0]) for n in range(99))


def test_ranks_are_compared_with_those_that_do_the_same_work():
    times = [1.0, 1.0, 2.0, 2.0]
    stages, all_alike = Stragglers([[0, 1], [2, 3]]), Stragglers([range(4)])
    assert not any(stages.add(times) for _ in range(40))
    assert any(all_alike.add(times) for _ in range(40))


def test_a_rank_without_peers_is_never_named():
    alone = Stragglers([[0]])
    assert not any(alone.add([1.0]) for _ in range(40))


def test_after_a_change_of_processes_it_begins_anew():
    stragglers = Stragglers([range(2)])
    for _ in range(15):
        stragglers.add([1.0, 1.5])
    stragglers.forget()
    assert not any(stragglers.add([1.0, 1.5]) for _ in range(15))


def test_s4_12_noise_alone_names_nobody():
    for seed in range(20):
        assert not named({}, num_ranks=8, num_steps=200, noise=0.5, seed=seed)


@settings(max_examples=200)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=9))
def test_the_ratio_is_to_the_median_of_the_others(times: list[float]):
    logs = np.log(times)
    expected = [log - np.median(np.delete(logs, rank)) for rank, log in enumerate(logs)]
    assert log_ratios(np.array(times)) == pytest.approx(expected, abs=1e-9)


def test_a_straggler_is_evicted_only_with_a_spare_and_a_gain():
    def decide(**changes: float) -> bool:
        asked = {"step_s": 1.0, "steps_left": 100, "eviction_s": 1.0, "num_spares": 1} | changes
        return worth_evicting(1.5, **asked)  # type: ignore[arg-type]

    assert decide()
    assert not decide(num_spares=0)
    assert not decide(steps_left=5)
    assert not decide(eviction_s=60.0)


def outliers(factor: float, num_ranks: int = 3, steps: int = 64) -> list[Straggler]:
    """Who is named when rank 1's losses are this many times those of its peers, which fall."""
    draw = np.random.default_rng(7)
    found, losses = [], LossOutliers([range(num_ranks)], [1.0] * num_ranks)
    for step in range(steps):
        mean = 2.0 + 3.0 / (1 + step)
        drawn = mean * draw.lognormal(0.0, 0.1, num_ranks)
        drawn[1] *= factor
        found += losses.add(drawn.tolist())
    return found


@pytest.mark.parametrize("num_ranks", [3, 4, 9])
@pytest.mark.parametrize("factor", [0.5, 1.5, 3.0])
def test_s4_12_a_rank_whose_losses_stay_off_its_peers_is_named_and_no_other(num_ranks, factor):
    (named,) = outliers(factor, num_ranks)
    assert named.rank == 1
    assert named.factor == pytest.approx(factor, rel=0.2)


def test_s4_12_losses_that_differ_by_chance_name_nobody():
    assert outliers(1.0, steps=500) == []


def test_s4_12_of_two_ranks_nobody_can_say_whose_loss_is_off():
    assert outliers(3.0, num_ranks=2) == []


def test_s4_12_ranks_without_a_loss_are_left_out_and_steps_without_a_number_are_not_compared():
    # Stages of a pipeline: only the last ones count.
    losses = LossOutliers([range(3), range(3, 6)], [None, None, None, 1.0, 1.0, 1.0])
    found = []
    for _ in range(20):
        found += losses.add([None, None, None, 1.0, float("nan"), 1.0])
        found += losses.add([None, None, None, 1.0, 1.0, 2.0])
    assert [one.rank for one in found] == [5]
