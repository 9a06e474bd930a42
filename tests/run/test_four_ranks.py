"""Four ranks, one of which is killed: only that one is replaced, and no finished step is lost."""

from itertools import pairwise

import pytest
from tests.run.scene import Scene, assert_same_end

from paceline.record import events as log

pytestmark = pytest.mark.ranks

FOUR = (
    *("--set", "cluster.per_node=4", "--set", "checkpoint.every=50"),
    *("--set", "layout.sharding=none"),
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("four"))


@pytest.mark.slow  # the quick one is in `tests/drill/test_fault_matrix_wide.py`
def test_ranks_1_and_0_are_killed_and_a_replica_gives_their_state_back(scene):
    kills = "drill.kill=[rank=1@step=4@backward, rank=0@step=8@forward]"
    run = scene.run("killed-ddp", *FOUR, "--set", kills)
    assert_same_end(run, scene.run("clean", *FOUR))
    found = [(each.lost_rank, each.steps_lost, each.source) for each in run.of(log.Recovered)]
    assert found == [(1, 0, "replica"), (0, 0, "replica")]
    # Of four processes only the killed one was not there before.
    for before, after in pairwise(run.of(log.TrainingStarted)):
        assert len(set(before.pids) & set(after.pids)) == 3
