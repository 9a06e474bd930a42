"""Four ranks, one of which is killed: only that one is replaced, and no finished step is lost."""

from itertools import pairwise

import pytest
from tests.run.scene import Record, Scene, assert_same_end

from paceline.record import events as log

pytestmark = pytest.mark.ranks

FOUR = ("--set", "cluster.per_node=4", "--set", "checkpoint.every=50")
LAYOUTS = {
    "ddp": ("--set", "layout.sharding=none"),
    "fsdp2": ("--set", "layout.sharding=full", "--set", "recovery.state=checkpoint"),
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("four"))


def clean(scene: Scene, layout: str) -> Record:
    return scene.run(f"clean-{layout}", *FOUR, *LAYOUTS[layout])


@pytest.mark.slow  # the quick ones are rows 26 and 27 in `tests/drill/test_fault_matrix.py`
def test_ranks_1_and_0_are_killed_and_a_replica_gives_their_state_back(scene):
    kills = "drill.kill=[rank=1@step=4@backward, rank=0@step=8@forward]"
    run = scene.run("killed-ddp", *FOUR, *LAYOUTS["ddp"], "--set", kills)
    assert_same_end(run, clean(scene, "ddp"))
    found = [(each.lost_rank, each.steps_lost, each.source) for each in run.of(log.Recovered)]
    assert found == [(1, 0, "replica"), (0, 0, "replica")]
    # Of four processes only the killed one was not there before.
    for before, after in pairwise(run.of(log.TrainingStarted)):
        assert len(set(before.pids) & set(after.pids)) == 3


def test_a_shard_that_is_nowhere_else_comes_back_from_the_checkpoint(scene):
    # Step 6 is long, so that what step 4 saves is whole before the kill.
    faults = "drill.faults=['long rank=0 step=6 for=2','kill rank=2 step=7 phase=apply']"
    asked = (*FOUR, *LAYOUTS["fsdp2"], "--set", "checkpoint.every=4", "--set", faults)
    run = scene.run("killed-fsdp2", *asked)
    assert_same_end(run, clean(scene, "fsdp2"))
    (recovered,) = run.of(log.Recovered)
    assert (recovered.source, recovered.resumed_from_step) == ("checkpoint", 4)
    assert recovered.steps_lost in (2, 3)  # a kill in `apply` may come after the others applied
