"""A program that is not ours: when all its processes are ended and started again."""

import signal
from dataclasses import replace

import msgspec
import pytest

from paceline.control import script_run
from paceline.control.environment import script_environment
from paceline.control.state import Clock
from paceline.record import events as log

SETUP = script_run.Setup(num_ranks=2, name="python train.py", max_restarts=2)


class Scene:
    def __init__(self, setup: script_run.Setup = SETUP) -> None:
        self.state = script_run.State(setup=setup)
        self.now = 100.0
        self.actions: list[script_run.Action] = []
        self.events: list[log.AnyEvent] = []

    def feed(self, event: script_run.Happening) -> list[script_run.Action]:
        found = script_run.decide(self.state, event, Clock(self.now, self.now + 1e9))
        self.actions += found
        self.events += [action.event for action in found if isinstance(action, script_run.Record)]
        return found

    def begin(self) -> None:
        """All ranks start, and show progress."""
        self.feed(script_run.Begin())
        self.started()
        self.feed(script_run.Printed(has_progressed=True, step=1))

    def started(self) -> None:
        for rank in range(self.state.setup.num_ranks):
            self.feed(script_run.Started(rank, 10 + rank))

    def exits(self, *codes: int) -> None:
        for rank, code in enumerate(codes):
            self.feed(script_run.Exited(rank, self.state.attempt, code))

    def wait(self, seconds: float) -> list[script_run.Action]:
        self.now += seconds
        return self.feed(script_run.Tick())

    def fails(self) -> None:
        self.exits(1, -9)

    def of(self, kind: type) -> list[log.AnyEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def test_it_is_finished_when_every_rank_exited_with_0_and_not_before():
    scene = Scene()
    scene.begin()
    scene.exits(0)
    assert scene.state.outcome is None
    scene.feed(script_run.Exited(1, 1, 0))
    assert (scene.state.outcome, scene.state.exit_code) == ("finished", 0)
    (end,) = scene.of(log.RunFinished)
    assert (end.exactness, end.state_digest) == ("unknown", None)


STEPS = replace(SETUP, num_steps=100)


def test_exits_with_0_before_the_last_step_are_a_failure_that_is_tried_again():
    scene = Scene(STEPS)
    scene.begin()
    scene.feed(script_run.Printed(has_progressed=True, step=40))
    scene.exits(0, 0)
    assert scene.state.phase == "pausing"
    (lost,) = scene.of(log.WorkerLost)
    assert lost.how == "exited with 0 after step 40 of 100"
    scene.wait(60.0)
    scene.started()
    scene.feed(script_run.Printed(has_progressed=True, step=100))
    scene.exits(0, 0)
    assert (scene.state.outcome, scene.state.restarts) == ("finished", 1)


def test_launchers_that_end_well_without_a_step_have_trained_nothing_and_are_not_tried_again():
    scene = Scene(replace(STEPS, word="node"))
    scene.feed(script_run.Begin())
    scene.started()
    scene.exits(0, 0)
    assert (scene.state.outcome, scene.state.exit_code) == ("failed", 4)
    assert scene.state.reason is not None
    assert scene.state.reason.startswith(
        "every node exited with 0 after step 0 of 100; not started"
    )


def test_a_run_whose_last_step_was_trained_before_may_end_without_another():
    scene = Scene(replace(STEPS, step_before=100, resumed=True))
    scene.feed(script_run.Begin())
    scene.started()
    scene.exits(0, 0)
    assert (scene.state.outcome, scene.state.exit_code) == ("finished", 0)


def test_one_rank_that_fails_ends_all_even_when_others_are_through():
    scene = Scene()
    scene.begin()
    scene.exits(0, 3)
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.how, lost.cause) == (1, "exited with 3", "process")
    assert script_run.Signal(signal.SIGKILL) in scene.actions
    assert scene.state.phase == "pausing"


def test_all_start_again_after_a_pause_that_doubles():
    scene = Scene(replace(SETUP, max_restarts=9, most_backoff_s=5.0))
    scene.begin()
    pauses = []
    for _ in range(5):
        scene.fails()
        paused = 0.0
        while scene.state.phase == "pausing":
            scene.wait(0.5)
            paused += 0.5
        pauses.append(paused)
        scene.started()
    assert pauses == [1, 2, 4, 5, 5]
    assert [a.restarts for a in scene.actions if isinstance(a, script_run.Start)] == list(range(6))


def test_restarts_in_a_row_that_do_not_last_end_the_run_with_the_exit_code_of_a_crash_loop():
    scene = Scene()
    scene.begin()
    for _ in range(2):
        scene.fails()
        scene.wait(60.0)
        scene.started()
    scene.fails()
    assert (scene.state.outcome, scene.state.exit_code) == ("failed", 7)
    assert scene.state.reason == "rank 0: exited with 1; 2 restarts in a row did not last"


RAISED = script_run.Raised(rank=0, lines=("Traceback", "KeyError: 3"), words="KeyError: 3")


def before_progress(returncode: int, raised: script_run.Raised | None = RAISED) -> Scene:
    scene = Scene()
    scene.feed(script_run.Begin())
    scene.started()
    scene.feed(script_run.Printed())
    scene.feed(script_run.Exited(0, 1, returncode, raised=raised))
    scene.feed(script_run.Exited(1, 1, -9))
    return scene


@pytest.mark.parametrize("returncode", [1, 2, -signal.SIGSEGV, -signal.SIGABRT])
def test_an_error_before_any_progress_is_not_tried_again(returncode):
    scene = before_progress(returncode)
    assert (scene.state.outcome, scene.state.exit_code) == ("failed", 4)
    assert sum(isinstance(action, script_run.Start) for action in scene.actions) == 1
    reason = scene.of(log.RunFinished)[0].reason
    assert "not started again" in reason
    assert returncode < 0 or "KeyError: 3" in reason
    assert scene.state.raised == RAISED


@pytest.mark.parametrize(
    ("returncode", "raised"),
    [(-signal.SIGKILL, RAISED), (-signal.SIGTERM, None), (1, replace(RAISED, is_passing=True))],
)
def test_what_comes_from_outside_is_tried_again_even_before_any_progress(returncode, raised):
    assert before_progress(returncode, raised).state.phase == "pausing"


def test_an_attempt_that_lasted_counts_as_started_although_it_printed_nothing_we_know():
    scene = Scene()
    scene.feed(script_run.Begin())
    scene.started()
    scene.now += script_run.START_S
    scene.exits(1, -9)
    assert scene.state.phase == "pausing"


def test_the_rank_that_raised_is_the_one_that_is_lost():
    scene = Scene()
    scene.begin()
    raised = replace(RAISED, rank=1)
    scene.feed(script_run.Exited(0, 1, 1, raised=raised))
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.rank, lost.pid, lost.detail) == (1, 11, "KeyError: 3")
    assert lost.how == "raised an exception; rank 0, which lost it, exited with 1"


def test_an_attempt_that_lasted_gives_the_patience_back():
    scene = Scene()
    scene.begin()
    for _ in range(9):
        scene.now += script_run.PROGRESS_S
        scene.fails()
        scene.wait(60.0)
        scene.started()
    assert scene.state.outcome is None


def test_silence_is_looked_into_recorded_with_stacks_and_ended():
    scene = Scene(replace(SETUP, silence_s=30.0))
    scene.begin()
    scene.now += 20
    scene.feed(script_run.Printed())
    assert scene.wait(20.0) == []
    assert scene.wait(10.0) == [script_run.Look()]
    scene.feed(script_run.Looked(1, {0: "in all_reduce", 1: "in sleep"}))
    stuck = scene.of(log.WorkerStuck)
    assert [event.stacks for event in stuck] == ["in all_reduce", "in sleep"]
    (lost,) = scene.of(log.WorkerLost)
    assert (lost.cause, lost.how) == ("hang", "no rank has printed anything for 30.0 s")
    scene.exits(-9, -9)
    assert scene.state.phase == "pausing"


def test_a_busy_machine_has_half_a_minute_to_say_where_its_ranks_stand():
    scene = Scene(replace(SETUP, silence_s=30.0))
    scene.begin()
    assert scene.wait(30.0) == [script_run.Look()]
    assert scene.wait(25.0) == []
    scene.feed(script_run.Looked(1, {0: "in all_reduce", 1: "in sleep"}))
    assert [event.stacks for event in scene.of(log.WorkerStuck)] == ["in all_reduce", "in sleep"]


def test_a_script_that_prints_while_it_is_looked_at_goes_on():
    scene = Scene(replace(SETUP, silence_s=30.0))
    scene.begin()
    assert scene.wait(30.0) == [script_run.Look()]
    scene.feed(script_run.Printed())
    scene.feed(script_run.Looked(1, {0: "in a save"}))
    assert scene.wait(29.0) == []
    assert scene.state.phase == "running"
    assert scene.of(log.WorkerLost) == []


def test_without_a_limit_silence_is_fine():
    scene = Scene()
    scene.begin()
    assert scene.wait(1e6) == []


def rhythmic(gap_s: float) -> Scene:
    scene = Scene(replace(SETUP, silence_s="auto"))
    scene.begin()
    while scene.state.step < 6 or scene.now < 100 + script_run.START_S:
        scene.now += gap_s
        scene.feed(script_run.Printed(has_progressed=True, step=scene.state.step + 1))
    return scene


@pytest.mark.parametrize(("gap_s", "limit_s"), [(1.0, 600.0), (100.0, 2000.0)])
def test_a_script_that_prints_steps_is_given_many_times_its_longest_pause(gap_s, limit_s):
    scene = rhythmic(gap_s)
    (noted,) = scene.of(log.Noted)
    assert f"{max(600, 20 * gap_s) / 60:g} min" in noted.text
    assert "--silence" in noted.text
    assert scene.wait(limit_s - 1) == []
    assert scene.wait(1) == [script_run.Look()]
    scene.feed(script_run.Looked(1, {}))
    assert scene.of(log.WorkerStuck)[0].limit_s == limit_s
    assert scene.of(log.WorkerLost)[0].last_step == scene.state.step


def test_after_a_hang_twice_the_silence_is_waited_for():
    scene = rhythmic(1.0)
    scene.wait(600)
    scene.feed(script_run.Looked(1, {}))
    assert scene.state.hangs == 1
    scene.exits(-9, -9)
    scene.wait(60)
    scene.started()
    for step in range(1, 7):
        scene.feed(script_run.Printed(has_progressed=True, step=step))
    assert scene.wait(1199) == []
    assert scene.wait(1) == [script_run.Look()]


def test_before_its_first_steps_a_script_may_load_and_compile_for_ever():
    scene = Scene(replace(SETUP, silence_s="auto"))
    scene.feed(script_run.Begin())
    scene.started()
    scene.feed(script_run.Printed())
    assert scene.wait(1e6) == []


def test_nobody_who_looks_in_time_does_not_keep_a_silent_attempt_alive():
    scene = Scene(replace(SETUP, silence_s=30.0))
    scene.begin()
    scene.wait(30.0)
    scene.wait(script_run.STACKS_S)
    assert scene.state.phase == "ending"


def test_a_late_exit_of_an_older_attempt_is_no_news():
    scene = Scene()
    scene.begin()
    scene.fails()
    scene.wait(60.0)
    scene.started()
    scene.feed(script_run.Exited(0, 1, 1))
    assert scene.state.phase == "running"


@pytest.mark.parametrize("codes", [(0, 0), (0, -15), (143, 0)])
def test_asked_to_stop_it_is_interrupted_however_the_processes_end(codes):
    scene = Scene()
    scene.begin()
    assert script_run.Signal(signal.SIGTERM) in scene.feed(script_run.StopWanted("SIGINT"))
    scene.exits(*codes)
    assert (scene.state.outcome, scene.state.exit_code) == ("interrupted", 130)
    assert not scene.of(log.WorkerLost)


def test_who_does_not_stop_within_the_grace_or_is_asked_twice_is_killed():
    scene = Scene()
    scene.begin()
    scene.feed(script_run.StopWanted("SIGINT"))
    assert scene.wait(60.0) == [script_run.Signal(signal.SIGKILL)]
    again = scene.feed(script_run.StopWanted("SIGINT"))
    assert script_run.Signal(signal.SIGKILL) in again


def test_a_command_that_cannot_start_is_not_tried_again():
    scene = Scene()
    scene.feed(script_run.Begin())
    scene.feed(script_run.NotStarted(0, "cannot be started: Exec format error"))
    assert (scene.state.outcome, scene.state.exit_code) == ("failed", 4)


def test_a_rank_has_what_torchrun_gives_it():
    found = script_environment(1, num_ranks=4, port=29511, restarts=2, threads=1)
    wanted = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29511", "PACELINE_RESTART": "2"}
    assert wanted.items() <= found.items()


def test_an_alert_is_recorded_and_ends_the_processes_where_it_asks_for_that():
    fired = log.AlertFired(rule="high", condition="train/loss > 1", metric="train/loss", value=2.0)
    scene = Scene()
    scene.begin()
    scene.feed(script_run.Found(fired))
    assert isinstance(scene.events[-1], log.AlertFired)
    assert scene.state.stop_by is None
    for _ in range(2):  # another one does not end them by force
        scene.feed(script_run.Found(msgspec.structs.replace(fired, on_alert="stop")))
    assert scene.state.stops == 1
    assert scene.state.stop_by == "alert high"
