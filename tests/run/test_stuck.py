"""Workers that do not die but stand still, in whole runs."""

import os
import signal

import pytest
from tests.run.scene import Record, Scene, is_alive, wait_until

from paceline.check.diagnose.diagnose import diagnose
from paceline.check.diagnose.flight import read_dump
from paceline.record import events as log
from paceline.record.log_files import find_logs

pytestmark = pytest.mark.ranks

PATIENCE_S = 12.0
LONG = ("--set", "train.steps=200", "--set", f"recovery.patience={PATIENCE_S}")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("stuck"))


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    return scene.run("clean", *LONG)


def test_an_undisturbed_run_calls_nobody_stuck(clean):
    assert not clean.of(log.WorkerStuck)
    assert not clean.of(log.WorkerLost)


def test_s1_15_a_stopped_worker_is_fenced_and_the_end_has_the_same_bits(scene, clean):
    process = scene.start("stopped", *LONG)
    record = scene.record("stopped")
    wait_until(lambda: len(record.all_metrics) >= 40, what="the fortieth step")
    wait_until(lambda: len(record.of(log.WorkerStarted)) > 2, what="the spare")
    victim = next(event for event in record.of(log.WorkerStarted) if event.rank == 1)
    os.kill(victim.pid, signal.SIGSTOP)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    (stuck,) = record.of(log.WorkerStuck)
    assert (stuck.rank, stuck.kind) == (1, "stopped")
    assert stuck.limit_s is not None
    (recovered,) = record.of(log.Recovered)
    assert recovered.steps_lost == 0
    assert record.digest == clean.digest
    assert record.samples == clean.samples
    assert not is_alive(victim.pid)
    kept = record.folder / "logs" / "flight-rank-0.json"
    dump = read_dump(kept.read_bytes(), source=kept.name, rank=None)
    assert (dump.rank, dump.generation) == (0, 1)  # of the rank that waited, in its hang
    logs = find_logs([str(record.folder)], scene.folder)
    found = diagnose(logs)
    assert "waits in collective" in found.facts["dump"]
    assert not found.has_failed
    assert not found.unknown
