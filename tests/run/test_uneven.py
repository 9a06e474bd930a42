"""Runs that go on after a loss on every rank that is left, with unequal numbers of samples."""

import pytest
from tests.run.scene import Record, Scene
from tests.run.test_own_code import own_scene

from paceline.parallel.shrink import rounding_bound
from paceline.record import events as log

pytestmark = pytest.mark.ranks

THREE_NODES = (
    *("--set", "cluster.nodes=3", "--set", "cluster.per_node=1", "--set", "train.global_batch=9"),
    *("--set", "recovery.spares=0", "--set", "recovery.replace_timeout=1"),
    *("--set", "train.steps=20", "--set", "evaluate.every=20"),
)
LOST = ("--set", "drill.faults=[node rank=1 step=6 for=600s]")


def assert_the_same_curve(run: Record, clean: Record) -> None:
    """Bitwise until the loss, and from then on to rounding, which is what the run promises."""
    assert [event.num_ranks for event in run.of(log.WorldChanged)] == [2]
    assert run.finished.exactness == "numeric"
    assert "exactness   numeric: the batch is added up over 2 data ranks" in run.output
    assert run.samples == clean.samples
    # A share of the state is larger on fewer ranks, and is saved as well.
    assert run.checkpoints[-1] == "step-00000020"
    (changed,) = run.of(log.ExactnessChanged)
    assert changed.tolerance == rounding_bound(9, 2.0**-24)
    losses = list(zip(run.metrics, clean.metrics, strict=True))
    assert len(losses) == 20
    # Steps after this one were computed, or computed again, on two ranks.
    first = run.of(log.Recovered)[0].resumed_from_step
    assert all(mine.loss == theirs.loss for mine, theirs in losses[:first])
    mine, theirs = losses[first]
    assert mine.loss == pytest.approx(theirs.loss, rel=changed.tolerance)
    for mine, theirs in losses[first:]:
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)


@pytest.mark.parametrize("micro_batch", [1, pytest.param(3, marks=pytest.mark.repeat)])
def test_s1_16_three_nodes_with_a_batch_of_nine_lose_one_and_both_others_go_on(
    tmp_path, micro_batch
):
    scene, size = Scene(tmp_path), ("--set", f"layout.micro_batch={micro_batch}")
    clean = scene.run("clean", *THREE_NODES, *size, "--set", "layout.sharding=none")
    run = scene.run("lost", *THREE_NODES, *size, "--set", "layout.sharding=none", *LOST)
    assert_the_same_curve(run, clean)


@pytest.mark.slow
def test_s1_16_ranks_that_share_parameters_take_unequal_numbers_too(tmp_path):
    scene = Scene(tmp_path)
    options = (*THREE_NODES, "--set", "layout.micro_batch=1", "--set", "layout.sharding=full")
    clean = scene.run("clean", *options)
    run = scene.run("lost", *options, *LOST)
    assert_the_same_curve(run, clean)


@pytest.mark.repeat  # the shares are those of the run above
def test_s1_16_a_loop_of_ones_own_weighs_its_means_by_their_samples(tmp_path):
    scene = own_scene(tmp_path)
    program = scene.folder / "mine.py"
    program.write_text(program.read_text().replace("nn.Dropout(0.5), ", ""))
    options = (*THREE_NODES[:-2], "--set", "layout.micro_batch=3")
    clean = scene.run("clean", *options)
    assert_the_same_curve(scene.run("lost", *options, *LOST), clean)
