"""A lost rank's shard, of which there is no replica, comes back from a node's memory."""

import pytest
from tests.run.scene import Record, Scene

from paceline.record import events as log
from paceline.record.snapshot_files import FOLDER, snapshot_slots

pytestmark = pytest.mark.ranks


def test_a_killed_ranks_shard_comes_back_from_memory_to_the_same_bits(tmp_path):
    scene = Scene(tmp_path)
    asked = (
        *("--set", "layout.sharding=full", "--set", "recovery.spares=0"),
        *("--set", "recovery.snapshot_every=2", "--set", "checkpoint.every=100"),
    )
    clean = scene.run("clean", *asked)
    killed = scene.run("killed", *asked, "--set", "drill.kill=[rank=1@step=8@backward]")
    (recovered,) = killed.of(log.Recovered)
    assert recovered.source == "memory"
    assert recovered.resumed_from_step == 6  # step 8's vote, which keeps step 7, never came
    assert recovered.steps_lost == 1
    assert killed.digest == clean.digest
    assert killed.samples == clean.samples
    assert not left_in_memory(killed)


def left_in_memory(run: Record) -> list[int]:
    return [slot for node in (0, 1) for slot in snapshot_slots(FOLDER, run.folder, node=node)]
