"""Processes that their machine takes away, with some notice."""

import os
import signal

import pytest
from tests.run.scene import Scene, wait_until
from tests.run.test_own_code import own_scene

from paceline.record import events as log

pytestmark = pytest.mark.ranks

SLOW = "__import__('time').sleep(0.1)"
STEPS = ("--set", "train.steps=60")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return own_scene(tmp_path_factory.mktemp("leaving"), fault=SLOW)


@pytest.mark.repeat  # the decision is in `tests/control/test_world.py`
@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_a_worker_that_gets_sigterm_hands_its_rank_to_a_spare_and_no_step_is_lost(scene, sharding):
    options = (*STEPS, "--set", f"layout.sharding={sharding}")
    clean = scene.run(f"clean-{sharding}", *options)
    process = scene.start(f"leaves-{sharding}", *options)
    record = scene.record(f"leaves-{sharding}")

    def started() -> list[log.WorkerStarted]:
        return record.of(log.WorkerStarted)

    wait_until(lambda: any(event.rank is None for event in started()), what="a spare")
    wait_until(lambda: len(record.all_metrics) >= 5, what="the fifth step")
    victim = next(event for event in started() if event.rank == 1)
    os.kill(victim.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "its rank goes to another process at the next step boundary" in output
    assert record.digest == clean.digest
    assert record.samples == clean.samples
    assert (record.finished.restarts, record.finished.exactness) == (0, "bitwise")
    assert not record.of(log.WorkerLost)
    steps = [line.step for line in record.all_metrics]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_without_a_spare_a_new_process_on_the_node_takes_the_rank_of_one_that_is_taken_away(scene):
    options = (*STEPS, "--set", "recovery.spares=0")
    clean = scene.run("clean-spareless", *options)
    process = scene.start("leaves-spareless", *options)
    record = scene.record("leaves-spareless")
    wait_until(lambda: len(record.all_metrics) >= 5, what="the fifth step")
    victim = next(event for event in record.of(log.WorkerStarted) if event.rank == 1)
    os.kill(victim.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "its rank goes to a new process on node 0 at the next step boundary" in output
    assert not record.of(log.WorldChanged)
    assert record.digest == clean.digest
    assert (record.finished.restarts, record.finished.exactness) == (0, "bitwise")
