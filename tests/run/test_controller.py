"""Runs whose controller is killed: training goes on without one, and ends with the same bits."""

import json
import os
import re
import signal
import time

import pytest
from tests.run.scene import Record, Scene, assert_same_end, is_alive, wait_until

from paceline.record import events as log
from paceline.record.ownership import is_held

pytestmark = pytest.mark.ranks

STEPS = ("--set", "train.steps=60", "--set", "checkpoint.every=20")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    return scene.run("clean", *STEPS)


def controller_of(run: Record) -> tuple[int, int]:
    """Its process and its epoch."""
    known = json.loads((run.folder / "control.json").read_text())
    return known["pid"], known["epoch"]


def at_step(run: Record, step: int) -> None:
    wait_until(lambda: len(run.all_metrics) >= step, what=f"step {step}")


def workers_of(run: Record) -> list[int]:
    return [event.pid for event in run.of(log.WorkerStarted)]


@pytest.mark.slow
def test_a_controller_killed_twice_is_replaced_while_training_goes_on(scene, clean):
    process = scene.start("killed", *STEPS)
    run = scene.record("killed")
    for step in (3, 20):
        at_step(run, step)
        pid, epoch = controller_of(run)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda before=epoch: controller_of(run)[1] > before, what="another controller")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_end(run, clean)
    assert [event.epoch for event in run.of(log.ControllerReplaced)] == [2, 3]
    assert not run.of(log.WorkerLost)
    assert len(workers_of(run)) == 3  # two ranks and a spare, none of them twice
    assert "controller" in output
    assert not (run.folder / "journal").exists()


@pytest.mark.slow  # the quick one is row 9 in `tests/drill/test_fault_matrix.py`
def test_a_controller_and_a_worker_killed_at_once_cost_no_step(scene, clean):
    process = scene.start("both", *STEPS)
    run = scene.record("both")
    at_step(run, 5)
    wait_until(lambda: len(workers_of(run)) == 3, what="the spare")
    os.kill(controller_of(run)[0], signal.SIGKILL)
    os.kill(workers_of(run)[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_end(run, clean)
    (recovered,) = run.of(log.Recovered)
    assert (recovered.lost_rank, recovered.steps_lost) == (1, 0)


def test_a_run_whose_command_was_killed_is_taken_over_as_it_goes(scene, clean):
    process = scene.start("front", *STEPS)
    run = scene.record("front")
    at_step(run, 5)
    first = controller_of(run)[0]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    wait_until(lambda: not is_alive(first), what="the controller to end with the command")
    before = workers_of(run)
    time.sleep(0.5)
    assert all(map(is_alive, before))
    resumed = scene.resume("front")
    assert_same_end(resumed, clean)
    assert len(resumed.of(log.RunStarted)) == 1
    assert workers_of(resumed)[: len(before)] == before
    assert not resumed.of(log.WorkerLost)


def test_a_controller_that_hangs_is_killed_and_replaced_before_the_lease_ends(scene, clean):
    process = scene.start("hung", *STEPS, "--set", "recovery.lease=30")
    run = scene.record("hung")
    at_step(run, 3)
    pid, epoch = controller_of(run)
    os.kill(pid, signal.SIGSTOP)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_end(run, clean)
    assert [event.epoch for event in run.of(log.ControllerReplaced)] == [epoch + 1]
    assert not run.of(log.WorkerLost)
    assert len(re.findall(r"the controller did not answer for \d+ s and was killed", output)) == 1


def test_asked_twice_a_run_whose_controller_hangs_is_ended_by_force(scene):
    process = scene.start("forced", "--set", "train.steps=4000")
    run = scene.record("forced")
    at_step(run, 3)
    controller = controller_of(run)[0]
    pids = [controller, *workers_of(run)]
    os.kill(controller, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    wait_until(lambda: not any(map(is_alive, pids)), what="all to be gone")
    assert not is_held(run.folder)


def test_without_a_controller_for_the_lease_the_workers_save_and_stop(scene, clean):
    longer = ("--set", "train.steps=4000", "--set", "recovery.lease=6")
    process = scene.start("lease", *longer)
    run = scene.record("lease")
    at_step(run, 3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    pids, seen = workers_of(run), run.all_metrics[-1].step
    wait_until(lambda: not any(map(is_alive, pids)), what="the workers to end")
    assert int(run.checkpoints[-1].removeprefix("step-")) > seen
