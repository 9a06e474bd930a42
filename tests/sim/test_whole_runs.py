"""Whole runs on the double of NCCL, with failures that gloo reports and NCCL does not."""

from functools import partial

import pytest
from tests.run.scene import Record, Scene, assert_same_end, use_double
from tests.run.test_own_code import own_scene

from paceline.record import events as log

pytestmark = pytest.mark.ranks

HELD_BACK = "wait 5"
"""The controller's word comes once the host waits for the device, as on a GPU."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """A job of few kernels; undisturbed runs in it are shared."""
    scene = Scene(tmp_path_factory.mktemp("sim"))
    scene.job["model"] = {"decoder": {"layers": 1, "hidden": 16, "heads": 2}}
    scene.job["data"]["seq_len"] = 16
    scene.job["train"] |= {"global_batch": 6, "steps": 6, "warmup_steps": 0}
    scene.job["checkpoint"] = {"every": 100}
    scene.job["evaluate"] = {"every": 100, "samples": 2}
    scene.write_job()
    return scene


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch):
    """Every worker started from here on computes on the double, with its settings."""
    use_double(monkeypatch)
    return partial(use_double, monkeypatch)


def hit(*faults: str) -> tuple[str, str]:
    return "--set", f"drill.kill=[{', '.join(faults)}]"


def undisturbed(scene: Scene, name: str, *asked: str) -> Record:
    if not (scene.folder / name).exists():
        scene.run(name, *asked)
    return scene.record(name)


def sources(run: Record) -> list[str]:
    return [each.source for each in run.of(log.Recovered)]


@pytest.mark.parametrize("after", ["own", pytest.param("nan", marks=pytest.mark.repeat)])
def test_a_step_whose_sums_were_aborted_is_not_applied(scene, double, after):
    clean = undisturbed(scene, "ddp")
    double(LATE=HELD_BACK, AFTER_ABORT=after)
    killed = scene.run(f"ddp-{after}", *hit("kill rank=1 step=4 phase=backward"))
    assert_same_end(killed, clean)
    assert sources(killed) == ["replica"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adamw-8bit", "adafactor"])
def test_an_optimizer_that_counts_on_the_host_is_healed_from_a_replica(scene, double, optimizer):
    asked = ("--set", f"train.optimizer={optimizer}")
    clean = undisturbed(scene, optimizer, *asked)
    double(LATE=HELD_BACK)
    killed = scene.run(f"{optimizer}-killed", *asked, *hit("kill rank=1 step=4 phase=backward"))
    assert_same_end(killed, clean)
    assert sources(killed) == ["replica"]


@pytest.mark.slow
def test_a_program_with_torchs_adamw_is_healed_from_a_replica(double, tmp_path):
    scene = own_scene(tmp_path)
    program = scene.folder / "mine.py"
    text = program.read_text().replace("points[ids]", "points[ids].to(session.place.device)")
    program.write_text(text.replace("nn.Dropout(0.5), ", ""))
    scene.job["train"]["steps"] = 6
    scene.job["checkpoint"]["every"] = 100
    scene.write_job()
    clean = scene.run("clean")
    double(LATE=HELD_BACK)
    killed = scene.run("killed", *hit("kill rank=1 step=4 phase=backward"))
    assert_same_end(killed, clean)
    assert sources(killed) == ["replica"]


@pytest.mark.slow
def test_a_state_whose_sender_died_is_nobodys_newest(scene, double, tmp_path):
    asked = ("--set", "cluster.per_node=3")
    clean = undisturbed(scene, "three", *asked)
    double(LATE=HELD_BACK, DIE_SENDING=str(tmp_path / "died"))
    killed = scene.run("three-killed", *asked, *hit("kill rank=2 step=4 phase=backward"))
    assert (tmp_path / "died").exists()
    assert_same_end(killed, clean)


def test_a_lost_shard_comes_back_from_memory_that_host_tensors_travel_from(scene, double):
    asked = (
        *("--set", "layout.sharding=full", "--set", "recovery.spares=0"),
        *("--set", "recovery.snapshot_every=1"),
    )
    clean = undisturbed(scene, "fsdp", *asked)
    killed = scene.run("fsdp-killed", *asked, *hit("kill rank=1 step=4 phase=backward"))
    assert_same_end(killed, clean)
    assert sources(killed) == ["memory"]


@pytest.mark.slow
def test_a_sum_that_takes_too_long_is_given_up_before_anybody_is_called_stuck(scene, double):
    clean = undisturbed(scene, "ddp")
    double()
    asked = ("--set", "recovery.collective_timeout=10", "--set", "recovery.patience=600")
    held_up = scene.run("ddp-stopped", *asked, *hit("stop rank=1 step=4 phase=vote"))
    assert_same_end(held_up, clean)
    first = held_up.of(log.WorkerLost)[0]
    assert first.cause == "network"
    assert "recovery.collective_timeout (10 s)" in first.detail
