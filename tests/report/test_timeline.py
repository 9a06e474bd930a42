"""A run's record in the order of its clock, and where the time went."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.report import made

from paceline.record import events as log
from paceline.report.head import head_of
from paceline.report.time_account import time_account
from paceline.report.timeline import (
    RunningClock,
    all_failures,
    failures,
    is_lost,
    outcome,
    parts,
)
from paceline.report.view import view_of


def seconds(record):
    return {share.key: share.seconds for share in time_account(record)}


def test_time_account_names_every_second_of_a_run_that_was_killed_and_recovered():
    record = made.killed_and_finished()
    spent = seconds(record)
    (part,) = parts(record)
    assert sum(spent.values()) == pytest.approx(part.end - part.start)
    assert spent["startup"] == pytest.approx(3.0)
    assert spent["start"] == pytest.approx(2.9)
    assert spent["evaluate"] == pytest.approx(5 * 0.3)
    assert spent["save"] == pytest.approx(10 * 0.05)
    # Steps 101 to 114, and the 0.05 s of step 115 until the kill.
    assert spent["lost"] == pytest.approx(14 * 0.1 + 14 * 0.001 + 0.05, abs=0.02)
    # Step 101 was repeated inside the recovery, as its first step.
    assert spent["forward"] == pytest.approx(199 * 0.035, abs=0.01)
    assert spent["rest"] < 0.3


def test_time_account_leaves_out_the_time_between_an_interruption_and_the_resume():
    record = made.record(
        [
            made.started(0),
            made.training(2, 1),
            made.finished(10, outcome="interrupted", step=3),
            made.started(1000, resumed=True),
            made.training(1003, 4),
            made.finished(1005),
        ],
        [made.line(step, 2 + step) for step in (1, 2, 3)] + [made.line(4, 1004)],
    )
    spent = seconds(record)
    assert sum(spent.values()) == pytest.approx(15)
    assert spent["startup"] == pytest.approx(5)
    assert spent["lost"] == 0


def test_time_account_calls_steps_lost_when_a_dead_controller_took_them_along():
    record = made.record(
        [made.started(0), made.training(2, 1), made.started(100), made.training(102, 3)],
        [made.line(step, 2 + step) for step in (1, 2, 3, 4)] + [made.line(3, 103)],
    )
    assert is_lost(record) == [False, False, True, True, False]
    assert seconds(record)["lost"] == pytest.approx(0.2)
    assert outcome(record) == "crashed"


def test_time_after_a_failure_that_nothing_followed_is_named_not_recovered():
    events = [made.started(), made.training(2, 1), made.lost(5, 2)]
    record = made.record([*events, made.finished(9, outcome="failed", step=2)], [made.line(1, 3)])
    spent = seconds(record)
    assert spent["unrecovered"] == pytest.approx(4)
    assert spent["lost"] == pytest.approx(2)  # the step under way when rank 1 was lost


@st.composite
def any_record(draw):
    """Events and lines at any times, in an order no run would write them in."""
    at = st.floats(0, 60)
    step = st.integers(1, 9)
    generation = st.integers(1, 3)
    kinds = st.one_of(
        st.builds(made.started, at),
        st.builds(made.training, at, step, generation=generation),
        st.builds(made.saved, at, step),
        st.builds(made.evaluated, at, step, st.floats(0, 9)),
        st.builds(made.lost, at, step, generation=generation),
        st.builds(made.recovered, at, step, st.integers(0, 3), generation=generation),
        st.builds(made.finished, at),
    )
    events = sorted(draw(st.lists(kinds, max_size=14)), key=lambda event: event.at)
    lines = draw(st.lists(st.builds(made.line, step, at, generation=generation), max_size=14))
    return made.record([made.started(), *events], sorted(lines, key=lambda line: line.at))


@settings(max_examples=300, deadline=None)
@given(any_record())
def test_time_shares_sum_to_the_wall_time_and_none_is_negative(record):
    account = time_account(record)
    wall = sum(part.end - part.start for part in parts(record))
    assert sum(share.seconds for share in account) == pytest.approx(wall, abs=1e-5)
    assert all(share.seconds >= 0 for share in account)
    if account:
        assert sum(share.share for share in account) == pytest.approx(1)


def test_a_failure_within_a_recovery_is_one_of_its_own_at_the_step_of_the_first():
    events = [
        made.started(),
        made.training(2, 1),
        made.lost(5, 40),
        made.lost(7, 0, generation=2, rank=0),
        made.training(9, 31, generation=3),
        made.recovered(10, 40, 30, generation=3),
    ]
    (part,) = parts(made.record(events))
    first, second = failures(part)
    assert (first.step, second.step) == (41, 41)
    assert first.recovered is None
    assert second.recovered is not None


def refit_run(*after):
    """A run that was out of memory in step 41 and resumed with half the micro-batch."""
    changed = log.PlanChanged(
        at=made.T0 + 6,
        generation=1,
        settings=["layout.micro_batch=4"],
        layout="DDP over 2 ranks",
        micro_batch=4,
        accumulation=2,
        global_batch=16,
        reason="rank 1 ran out of memory after step 40",
    )
    began = msgspec.structs.replace(made.started(), arithmetic={"layout.micro_batch": 8})
    first = [began, made.training(2, 1), made.lost(5, 40)]
    ended = msgspec.structs.replace(made.finished(5.5, outcome="failed", step=40), restarts=0)
    return made.record([*first, ended, changed, made.started(7, resumed=True), *after])


def test_a_failure_that_a_leaner_layout_recovers_from_has_its_time_and_its_change():
    back = [made.training(8, 31, generation=2), made.recovered(9, 40, 30)]
    ((_, failure),) = all_failures(parts(refit_run(*back)))
    assert failure.recovered is not None
    assert failure.recovered.downtime_s == 4.3
    assert failure.changed == "layout.micro_batch 8 to 4"
    ended = msgspec.structs.replace(made.finished(20), restarts=0)
    head = head_of(view_of(refit_run(*back, ended)))
    (tile,) = (each for each in head.tiles if each.name == "Failures")
    assert tile.note == "back in 4.3 s, 10 steps repeated; layout.micro_batch 8 to 4"
    assert ("Restarts", "1") in head.facts


def test_a_leaner_layout_that_is_out_of_memory_too_recovers_nothing():
    back = [made.training(8, 31, generation=2), made.lost(9, 40, generation=2)]
    every = all_failures(parts(refit_run(*back)))
    assert [failure.recovered for _, failure in every] == [None, None]


def test_the_cause_of_a_failure_is_the_signal_when_another_rank_told_of_it_first():
    told = log.WorkerLost(
        at=made.T0 + 5,
        generation=1,
        rank=0,
        node=0,
        pid=1,
        how="RuntimeError: peer went away",
        detail=None,
        last_step=7,
    )
    (part,) = parts(made.record([made.started(), told, made.lost(5.1, 7, rank=1)]))
    (failure,) = failures(part)
    assert failure.lost.rank == 1
    assert failure.lost.how == "killed by SIGKILL"


def test_running_clock_stands_still_between_the_parts():
    record = made.record(
        [made.started(0), made.finished(10), made.started(100), made.finished(105)]
    )
    clock = RunningClock(parts(record))
    assert [clock(made.T0 + at) for at in (-5, 4, 50, 103)] == [0, 4, 10, 13]


def test_a_run_without_events_has_no_account_and_is_new():
    assert time_account(made.record()) == []
    assert outcome(made.record()) == "new"
    assert math.isfinite(RunningClock(())(made.T0))
