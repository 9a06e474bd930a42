"""How long a phase may take, learned under a clock of the test's own."""

import random

from hypothesis import given
from hypothesis import strategies as st

from paceline.control.patience import ENOUGH, WINDOW, Patience
from paceline.control.slots import Duration, Phase


def learned(
    *seconds: float, phase: Phase = Phase.FORWARD, first: bool = False, floor_s: float = 2.0
) -> Patience:
    patience = Patience(floor_s=floor_s)
    patience.learn(Duration(phase, first, one) for one in seconds)
    return patience


def test_before_enough_samples_it_is_generous():
    assert learned(floor_s=10.0).limits(Phase.FORWARD).fence_s == 300.0
    assert learned(*[0.1] * (ENOUGH - 1), floor_s=10.0).limits(Phase.FORWARD).fence_s == 30.0
    assert learned(*[0.1] * ENOUGH, floor_s=10.0).limits(Phase.FORWARD).fence_s == 10.0


def test_a_first_step_tells_how_long_the_second_may_take_at_most():
    second = learned(20.0, first=True, floor_s=10.0).limits(Phase.FORWARD)
    assert second.fence_s == 240.0


def test_a_load_that_was_short_says_little_about_the_next():
    short = learned(0.1, phase=Phase.RESTORING, floor_s=10.0)
    assert short.limits(Phase.RESTORING).fence_s == 450.0


def test_a_smaller_floor_makes_everything_less_patient():
    assert learned(floor_s=1.0).limits(Phase.FORWARD).fence_s == 30.0


def test_a_regular_phase_is_late_soon_and_a_restless_one_later():
    regular = learned(*[10.0, 10.1] * 20).limits(Phase.FORWARD)
    restless = learned(*[10.0, 20.0] * 20).limits(Phase.FORWARD)
    assert 10 < regular.suspect_s < 12
    assert restless.suspect_s > 100


def test_a_step_ten_times_as_long_is_slow_and_not_stuck():
    assert learned(*[3.0] * 40).limits(Phase.FORWARD).fence_s > 30.0


def test_the_first_step_neither_teaches_the_others_nor_is_judged_by_them():
    patience = learned(*[60.0] * ENOUGH, first=True)
    patience.learn(Duration(Phase.FORWARD, False, 0.1) for _ in range(40))
    assert patience.limits(Phase.FORWARD).fence_s == 2.0
    assert patience.limits(Phase.FORWARD, is_first_step=True).fence_s > 60.0


def test_a_long_save_makes_nobody_patient_with_a_forward_pass():
    patience = learned(*[40.0] * 40, phase=Phase.SAVE)
    patience.learn(Duration(Phase.FORWARD, False, 0.1) for _ in range(40))
    assert patience.limits(Phase.FORWARD).fence_s == 2.0
    assert patience.limits(Phase.SAVE).fence_s == 480.0


def test_a_rare_long_case_is_remembered_though_the_deviation_does_not_show_it():
    seconds = ([1.0] * 49 + [30.0]) * 5
    assert learned(*seconds).limits(Phase.FORWARD).fence_s == 60.0


def test_who_waits_for_orders_is_never_late():
    assert learned().limits(Phase.PARKED).suspect_s == float("inf")


def test_the_programs_own_code_between_steps_may_do_anything_now_and_then():
    known = learned(*[0.001] * 99, phase=Phase.BOUNDARY, floor_s=10.0)
    assert known.limits(Phase.BOUNDARY).fence_s == 300.0


def test_a_run_that_becomes_slower_for_good_is_believed():
    patience = learned(*[0.5] * WINDOW)
    patience.learn(Duration(Phase.FORWARD, False, 5.0) for _ in range(WINDOW))
    assert patience.limits(Phase.FORWARD).fence_s == 60.0


@given(st.lists(st.floats(0.0, 1e4), min_size=ENOUGH, max_size=600))
def test_a_limit_is_above_the_floor_and_above_all_it_remembers(seconds: list[float]):
    patience = learned(*seconds)
    limits = patience.limits(Phase.FORWARD)
    assert limits.fence_s >= limits.suspect_s >= 1.0
    assert limits.fence_s >= 2.0
    assert all(limits.fence_s >= one for one in seconds)


def test_lognormal_steps_are_never_late():
    draw = random.Random(1)
    patience = learned()
    for _ in range(20_000):
        seconds = draw.lognormvariate(0.0, 0.3)
        assert seconds < patience.limits(Phase.FORWARD).fence_s
        patience.learn([Duration(Phase.FORWARD, False, seconds)])
