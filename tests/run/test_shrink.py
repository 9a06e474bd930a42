"""Runs on fewer ranks than planned, and back."""

import pytest
from tests.run.scene import Record, Scene
from tests.run.test_own_code import own_scene

from paceline.parallel.shrink import rounding_bound
from paceline.record import events as log

pytestmark = pytest.mark.ranks

SLOW = (
    "__import__('time').sleep("
    "0.2 if session.place.world_size == 1 and session.run.path.name == 'back' else 0.02)"
)
"""So slowly that the node has returned before the last step."""

TWO_NODES = ("--set", "cluster.nodes=2", "--set", "cluster.per_node=1")
NO_SPARE = ("--set", "recovery.spares=0", "--set", "recovery.replace_timeout=1")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    found = own_scene(tmp_path_factory.mktemp("shrink"), fault=SLOW)
    program = found.folder / "mine.py"
    # Which numbers dropout draws depends on the rank that a sample is on.
    program.write_text(program.read_text().replace("nn.Dropout(0.5), ", ""))
    return found


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    return scene.run("clean", *TWO_NODES, *NO_SPARE, "--set", "train.steps=80")


def lost(scene: Scene, name: str, *more: str, away: str, step: int = 6) -> Record:
    fault = f"drill.faults=[node rank=1 step={step} for={away}]"
    options = ("--set", "train.steps=80", "--set", fault)
    return scene.run(name, *TWO_NODES, *NO_SPARE, *options, *more)


def assert_equal_to_rounding(run: Record, clean: Record) -> None:
    assert run.finished.outcome == "finished", run.story
    assert run.finished.exactness == "numeric"
    assert run.samples == clean.samples
    (changed,) = run.of(log.ExactnessChanged)
    assert changed.tolerance == rounding_bound(8, 2.0**-24)
    losses = [
        (mine.loss, theirs.loss) for mine, theirs in zip(run.metrics, clean.metrics, strict=True)
    ]
    assert all(mine == theirs for mine, theirs in losses[:5])
    first = run.of(log.Recovered)[0].resumed_from_step
    # The first step that adds up otherwise starts from the same bits: the bound holds for it. Those
    # after it start from parameters that differ; a hundred times it is far below a wrong step's.
    assert losses[first][0] == pytest.approx(losses[first][1], rel=changed.tolerance)
    for mine, theirs in losses:
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_a_node_that_stays_away_is_done_without_and_the_batch_stays_the_same(scene, clean):
    run = lost(scene, "away", away="600s")
    assert_equal_to_rounding(run, clean)
    (recovered,) = run.of(log.Recovered)
    assert (recovered.source, recovered.steps_lost) == ("own", 0)
    assert [event.num_ranks for event in run.of(log.WorldChanged)] == [1]
    assert "no longer to the bit" in run.output
    assert "exactness   numeric" in run.output


@pytest.mark.repeat  # the decisions are in `tests/control/test_world.py`
def test_the_world_grows_back_when_the_node_returns_without_redoing_a_step(scene, clean):
    run = lost(scene, "back", away="5s")
    assert_equal_to_rounding(run, clean)
    assert [event.num_ranks for event in run.of(log.WorldChanged)] == [1, 2]
    steps = [line.step for line in run.all_metrics]
    assert steps == sorted(set(steps))
    assert run.of(log.TrainingStarted)[-1].world_size == 2
    assert run.finished.restarts == 1


@pytest.mark.slow
def test_shards_that_went_with_the_node_come_from_a_checkpoint_for_the_smaller_world(scene):
    sharded = ("--set", "layout.sharding=full")
    clean = scene.run("clean-full", *TWO_NODES, *NO_SPARE, *sharded, "--set", "train.steps=80")
    run = lost(scene, "full", *sharded, away="600s", step=30)  # some saves are through by then
    assert run.of(log.Recovered)[0].source == "checkpoint"
    assert run.samples == clean.samples
    assert run.metrics[-1].loss == pytest.approx(clean.metrics[-1].loss, rel=1e-3)
