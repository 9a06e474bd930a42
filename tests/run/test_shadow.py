"""Whole runs whose shards have no replica: a lost rank comes back from a neighbour's shadow."""

import os
import signal
from pathlib import Path

import pytest
from tests.run.scene import Record, Scene, assert_same_end, wait_until

from paceline.errors import PlanError
from paceline.record import events as log

pytestmark = pytest.mark.ranks

SHADOW = ("--set", "recovery.state=shadow")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("shadows"))


def options(sharding: str, ranks: int = 2) -> tuple[str, ...]:
    return ("--set", f"layout.sharding={sharding}", "--set", f"cluster.per_node={ranks}")


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    """FSDP2 on two ranks, undisturbed and without shadows."""
    return scene.run("clean", *options("full"))


@pytest.fixture(scope="module")
def clean_on_four(scene: Scene) -> Record:
    return scene.run("clean-4", *options("full", 4))


def drill(*kills: str) -> tuple[str, str]:
    return "--set", f"drill.kill=[{', '.join(kills)}]"


def assert_nothing_was_lost(run: Record, clean: Record, kills: int = 1) -> None:
    assert_same_end(run, clean)
    recovered = run.of(log.Recovered)
    assert len(recovered) == kills
    for event in recovered:
        assert (event.source, event.steps_lost, event.in_place) == ("shadow", 0, True)


@pytest.mark.slow  # the quick one is of four ranks, below
@pytest.mark.parametrize("phase", ["forward", "backward", "apply"])
def test_a_killed_fsdp2_rank_comes_back_from_its_shadow_and_no_step_is_done_again(
    scene, clean, phase
):
    run = scene.run(f"full-{phase}", *options("full"), *SHADOW, *drill(f"rank=1@step=6@{phase}"))
    assert_nothing_was_lost(run, clean)
    (event,) = run.of(log.Recovered)
    # Killed in the update, after the vote: the shadow is rolled forward to that step.
    assert event.resumed_from_step == (6 if phase == "apply" else 5)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_so_does_a_rank_that_shards_its_optimizer_only(scene, sharding):
    clean = scene.run(f"clean-{sharding}", *options(sharding))
    kills = ("rank=0@step=3@apply", "rank=1@step=8@backward")
    run = scene.run(f"killed-{sharding}", *options(sharding), *SHADOW, *drill(*kills))
    assert_nothing_was_lost(run, clean, kills=2)


def test_of_four_ranks_one_after_the_other_is_killed_in_every_phase(scene, clean_on_four):
    kills = ("rank=2@step=3@forward", "rank=0@step=6@apply", "rank=3@step=9@backward")
    run = scene.run("four", *options("full", 4), *SHADOW, *drill(*kills))
    assert_nothing_was_lost(run, clean_on_four, kills=3)


@pytest.mark.slow
def test_two_ranks_that_hold_no_shadow_of_each_other_may_die_at_once(scene, clean_on_four):
    kills = ("rank=0@step=6@apply", "rank=2@step=6@apply")
    run = scene.run("two-of-four", *options("full", 4), *SHADOW, *drill(*kills))
    assert_same_end(run, clean_on_four)
    for event in run.of(log.Recovered):
        assert (event.source, event.steps_lost) == ("shadow", 0)


@pytest.mark.slow
def test_a_rank_killed_together_with_its_shadows_holder_comes_from_the_checkpoint_and_it_is_said(
    scene,
):
    longer = (*options("full", 4), "--set", "train.steps=60", "--set", "checkpoint.every=10")
    clean = scene.run("clean-longer", *longer)
    kills = ("rank=0@step=57@apply", "rank=1@step=57@apply")
    run = scene.run("pair", *longer, *SHADOW, *drill(*kills))
    assert_same_end(run, clean)
    (recovered,) = run.of(log.Recovered)
    assert recovered.source == "checkpoint"
    assert recovered.steps_lost > 0
    said = [note.text for note in run.of(log.Noted) if "state of rank(s)" in note.text]
    assert len(said) == 1
    assert said[0].startswith("no living rank has the state of rank(s) 0 at step 57, nor a shadow")


def test_a_shard_that_is_nowhere_else_comes_back_from_the_checkpoint(scene, clean_on_four):
    # Step 6 is long, so that what step 4 saves is whole before the kill.
    faults = "drill.faults=['long rank=0 step=6 for=2','kill rank=2 step=7 phase=apply']"
    asked = (*options("full", 4), "--set", "recovery.state=checkpoint", "--set", faults)
    run = scene.run("killed-fsdp2", *asked)
    assert_same_end(run, clean_on_four)
    (recovered,) = run.of(log.Recovered)
    assert (recovered.source, recovered.resumed_from_step) == ("checkpoint", 4)
    assert recovered.steps_lost in (2, 3)  # a kill in `apply` may come after the others applied


def test_a_whole_node_is_lost_and_its_shards_come_from_the_other_nodes_shadows(
    scene, clean_on_four
):
    nodes = ("--set", "cluster.nodes=2", *options("full", 2))
    process = scene.start("node", *nodes, *SHADOW, "--set", "train.steps=12")
    record = scene.record("node")
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    first = next(event for event in record.of(log.WorkerStarted) if event.rank == 2)
    agent = int(Path(f"/proc/{first.pid}/status").read_text().split("PPid:")[1].split()[0])
    os.kill(agent, signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert_same_end(record, clean_on_four)
    lost = record.of(log.WorkerLost)
    if lost:  # the run may have been through before the kill
        (event,) = record.of(log.Recovered)
        assert (event.source, event.steps_lost) == ("shadow", 0)


def test_muon_whose_update_needs_all_shards_is_refused_a_shadow_by_name(scene):
    done = scene.paceline(
        "run", "job.yaml", *options("full"), *SHADOW, "--set", "train.optimizer=muon"
    )
    assert done.returncode == PlanError.exit_code
    assert "P005" in done.stderr
    assert "muon" in done.stderr
