"""Runs whose shards have no replica: a lost rank's shard comes from memory or a checkpoint."""

import os
import signal
from pathlib import Path

import pytest
from tests.run.scene import Record, Scene, assert_same_end, wait_until

from paceline.record import events as log

pytestmark = pytest.mark.ranks

MEMORY = ("--set", "recovery.state=memory", "--set", "recovery.snapshot_every=2")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("sharded"))


def options(ranks: int) -> tuple[str, ...]:
    return ("--set", "layout.sharding=full", "--set", f"cluster.per_node={ranks}")


@pytest.fixture(scope="module")
def clean_on_four(scene: Scene) -> Record:
    """FSDP2 on four ranks, undisturbed."""
    return scene.run("clean-4", *options(4))


@pytest.mark.repeat  # a checkpoint is read again in `test_resume.py`, a shard lost below
def test_s4_14_a_shard_that_is_nowhere_else_comes_back_from_the_checkpoint(scene, clean_on_four):
    # Step 6 is long, so that what step 4 saves is whole before the kill.
    faults = "drill.faults=['long rank=0 step=6 for=6','kill rank=2 step=7 phase=apply']"
    asked = (*options(4), "--set", "recovery.state=checkpoint", "--set", faults)
    run = scene.run("killed-fsdp2", *asked)
    assert_same_end(run, clean_on_four)
    (recovered,) = run.of(log.Recovered)
    assert (recovered.source, recovered.resumed_from_step) == ("checkpoint", 4)
    assert recovered.steps_lost in (2, 3)  # a kill in `apply` may come after the others applied
    said = [note.text for note in run.of(log.Noted) if "state of rank " in note.text]
    assert len(said) == 1
    assert said[0].startswith("no living rank has the state of rank 2 at step ")


def test_s4_14_a_whole_node_is_lost_and_its_shards_come_back(scene, clean_on_four):
    nodes = ("--set", "cluster.nodes=2", *options(2))
    process = scene.start("node", *nodes, *MEMORY, "--set", "checkpoint.every=100")
    record = scene.record("node")
    # What step 2 had is on the other node by step 4's update.
    wait_until(lambda: len(record.all_metrics) >= 4, what="the fourth step")
    first = next(event for event in record.of(log.WorkerStarted) if event.rank == 2)
    agent = int(Path(f"/proc/{first.pid}/status").read_text().split("PPid:")[1].split()[0])
    os.kill(agent, signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_end(record, clean_on_four)
    lost = record.of(log.WorkerLost)
    if lost:  # the run may have been through before the kill
        (event,) = record.of(log.Recovered)
        assert event.source == "memory"
