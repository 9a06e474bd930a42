"""The share of the time that is useful when machines fail."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.estimate.goodput import (
    DEFAULT_RANK_MTBF_S,
    daly_interval_s,
    goodput,
    job_mtbf_s,
    young_interval_s,
)

DAY_S = 86_400.0


def simulated(*, mtbf_s: float, interval_s: float, save_s: float, restart_s: float) -> float:
    """The same by playing it through."""
    dice = random.Random(1)
    useful = wall = 0.0
    failure = dice.expovariate(1 / mtbf_s)
    while useful < 3000 * interval_s:
        if wall + interval_s + save_s <= failure:
            wall += interval_s + save_s
            useful += interval_s
            continue
        while True:  # a restart may fail too
            wall, failure = failure, failure + dice.expovariate(1 / mtbf_s)
            if wall + restart_s <= failure:
                wall += restart_s
                break
    return useful / wall


def test_llama_3_failed_every_three_hours_on_16384_gpus():
    assert job_mtbf_s(16_384, DEFAULT_RANK_MTBF_S) == pytest.approx(54 * DAY_S / 419)


@pytest.mark.parametrize("mtbf_s", [2_000.0, 10_000.0, 100_000.0])
def test_goodput_equals_a_run_that_is_played_through(mtbf_s: float):
    case = {"mtbf_s": mtbf_s, "interval_s": 1000.0, "save_s": 60.0, "restart_s": 400.0}
    assert goodput(**case).useful == pytest.approx(simulated(**case), abs=0.02)


@given(
    st.floats(1e2, 1e9), st.floats(1, 1e6), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e4)
)
def test_the_terms_and_the_useful_share_add_up_to_one(mtbf, interval, save, restart, background):
    found = goodput(
        mtbf_s=mtbf,
        interval_s=interval,
        save_s=save,
        restart_s=restart,
        background_s=background,
    )
    assert found.useful + sum(found.terms.values()) == pytest.approx(1, abs=1e-6)
    assert all(share >= -1e-9 for share in found.terms.values())


@given(st.floats(1, 300), st.floats(1e4, 1e7))
def test_dalys_interval_is_the_best_one(save: float, mtbf: float):
    best = daly_interval_s(save, mtbf)

    def useful(interval: float) -> float:
        return goodput(mtbf_s=mtbf, interval_s=interval, save_s=save, restart_s=100).useful

    assert useful(best) >= max(useful(best * 0.7), useful(best * 1.4))


def test_young_and_daly_agree_when_saves_are_short():
    assert daly_interval_s(1, 1e6) == pytest.approx(young_interval_s(1, 1e6), rel=0.01)


def test_a_save_longer_than_two_failures_apart_is_made_once_between_failures():
    assert daly_interval_s(500, 100) == 100


def test_a_job_that_fails_before_it_saves_does_nothing_useful():
    found = goodput(mtbf_s=1, interval_s=10_000, save_s=60, restart_s=60)
    assert found.useful == 0
    assert found.terms["lost"] == 1


def test_a_time_between_failures_of_zero_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        goodput(mtbf_s=0, interval_s=1, save_s=0, restart_s=0)
    with pytest.raises(ValueError, match="at least one part"):
        job_mtbf_s(0, 1)
