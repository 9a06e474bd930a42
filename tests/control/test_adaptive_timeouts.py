"""How long a phase may take, learned under a clock of the test's own."""

import random

from hypothesis import given
from hypothesis import strategies as st

from paceline.control.adaptive_timeouts import ENOUGH, WINDOW, Patience
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


def on_accelerator(*steps: tuple[float, float, float]) -> Patience:
    """Steps of two micro-batches: launches of the passes, and the wait in the vote."""
    patience = Patience(floor_s=10.0, on_accelerator=True)
    for forward_s, backward_s, vote_s in steps:
        passes = [Duration(Phase.FORWARD, False, forward_s)]
        passes += [Duration(Phase.BACKWARD, False, backward_s)]
        rest = [Duration(Phase.VOTE, False, vote_s), Duration(Phase.BOUNDARY, False, 0.0)]
        patience.learn([*passes, *passes, *rest])
    return patience


def test_on_an_accelerator_every_phase_may_take_what_whole_steps_take():
    """The host launches in a millisecond what the device does in two seconds."""
    patience = on_accelerator(*[(0.001, 0.001, 2.0)] * 40)
    for phase in (Phase.BACKWARD, Phase.VOTE, Phase.APPLY):
        assert 24.0 < patience.limits(phase).fence_s < 24.2, phase
    on_cpu = learned(*[0.001] * 40, phase=Phase.BACKWARD, floor_s=10.0)
    assert on_cpu.limits(Phase.BACKWARD).fence_s == 10.0


def test_on_an_accelerator_a_program_may_read_its_data_for_longer_than_the_floor():
    patience = on_accelerator(*[(0.001, 0.001, 0.2)] * 40)
    assert patience.limits(Phase.FORWARD).fence_s == 300.0
    assert patience.limits(Phase.VOTE).fence_s == 10.0


def test_steps_of_two_workers_are_not_mixed_up():
    patience = Patience(floor_s=10.0, on_accelerator=True)
    for _ in range(40):
        for phase, seconds in ((Phase.FORWARD, 1.0), (Phase.BACKWARD, 1.0), (Phase.VOTE, 1.0)):
            for worker in (0, 1):
                patience.learn([Duration(phase, False, seconds)], worker)
    assert patience.limits(Phase.VOTE).fence_s == 36.0


def test_ranks_that_meet_have_longer_the_more_they_are():
    """The controller's own limit for 16,384 ranks is 388 s, and comes first."""
    assert Patience(floor_s=10.0, num_ranks=2).limits(Phase.JOINING).fence_s < 130.0
    assert Patience(floor_s=10.0, num_ranks=16384).limits(Phase.JOINING).fence_s > 700.0
