"""Runs that end before their last step, as nothing improves any more."""

import shutil

import pytest
from tests.run.scene import Record, Scene

from paceline.record import events as log

pytestmark = pytest.mark.ranks

IMPATIENT = (
    *("--set", "train.steps=40", "--set", "train.schedule=constant"),
    *("--set", "evaluate.every=2", "--set", "evaluate.patience=2"),
    # No loss falls by this much, so the evaluation before training stays the one to beat.
    *("--set", "evaluate.min_delta=100", "--set", "checkpoint.keep_last=1"),
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def calm(scene: Scene) -> Record:
    return scene.run("calm", *IMPATIENT)


def early_of(run: Record) -> log.StoppedEarly:
    (early,) = run.of(log.StoppedEarly)
    return early


def test_a_run_without_improvements_ends_and_keeps_its_best_checkpoint(calm):
    early = early_of(calm)
    assert (early.step, early.waited) == (4, 2)
    assert (calm.finished.outcome, calm.finished.step) == ("finished", 4)
    losses = {event.step: event.loss for event in calm.of(log.Evaluated)}
    assert list(losses) == [0, 2, 4]
    assert early.best_loss == min(losses.values())
    assert f"step-{early.best_step:08d}" in calm.checkpoints
    assert "no improvement in 2 evaluations" in calm.output


@pytest.mark.repeat  # when it ends is above, that it recovers in `test_recovery.py`
def test_a_run_that_lost_a_rank_ends_at_the_same_step_with_the_same_state(scene, calm):
    hurt = scene.run("hurt", *IMPATIENT, "--set", "drill.kill=[rank=1@step=4]")
    assert hurt.finished.restarts == 1
    early, before = early_of(hurt), early_of(calm)
    assert (early.step, early.best_step) == (before.step, before.best_step)
    assert early.best_loss == before.best_loss
    assert hurt.digest == calm.digest


def test_a_run_that_stopped_early_is_resumed_only_with_more_patience(scene, calm):
    shutil.copytree(calm.folder, scene.folder / "again")
    refused = scene.resume("again", code=2)
    assert "R008" in refused.output
    assert "evaluate.patience=4" in refused.output
    longer = scene.resume("again", "--set", "evaluate.patience=3")
    assert [event.step for event in longer.of(log.StoppedEarly)] == [4, 6]
    assert longer.finished.step == 6
