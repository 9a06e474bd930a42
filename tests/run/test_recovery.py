"""Runs that are killed or interrupted, against one that is left alone."""

import os
import random
import signal
import subprocess
import time

import pytest
from tests.run.scene import Record, Scene, agent_of, assert_same_end, is_alive, wait_until

from paceline.record import events as log

pytestmark = pytest.mark.ranks

FSDP2 = ("--set", "layout.sharding=full")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    """DDP on two ranks, undisturbed."""
    return scene.run("clean")


@pytest.fixture(scope="module")
def clean_fsdp2(scene: Scene) -> Record:
    return scene.run("clean-fsdp2", *FSDP2)


def random_kills(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    # Apart, so that one recovery is over before the next fault: two of two ranks hold all there is.
    steps = [1 + 4 * number + draw.randrange(3) for number in range(count)]
    return [
        f"rank={draw.randrange(2)}@step={step}@{draw.choice(['forward', 'backward', 'apply'])}"
        for step in steps
    ]


def drill(*kills: str) -> tuple[str, str]:
    return "--set", f"drill.kill=[{', '.join(kills)}]"


def test_an_undisturbed_run_loses_no_worker_and_writes_no_page_when_told_not_to(clean):
    assert not clean.of(log.WorkerLost)
    assert not (clean.folder / "report.html").exists()
    assert "no report   `paceline report RUN` writes it" in clean.output


@pytest.mark.slow  # every run that is killed says it too
def test_an_undisturbed_run_is_the_same_every_time(scene, clean):
    assert_same_end(scene.run("clean-again"), clean)


@pytest.mark.repeat  # as every other state, in the tests around it
def test_adapters_end_with_the_same_bits_after_a_kill(scene):
    """The frozen weights are in no rank's state: the new rank makes its part of them again."""
    model = "model.decoder={layers: 2, hidden: 64, heads: 2, ffn: 128}"
    flags = (*FSDP2, "--set", model, "--set", "train.steps=5")
    flags = (*flags, "--set", "train.adapter={kind: qlora, rank: 2}")
    killed = scene.run("adapters-killed", *flags, *drill("rank=1@step=3@backward"))
    assert killed.of(log.WorkerLost)
    assert_same_end(killed, scene.run("adapters", *flags))


@pytest.mark.slow  # the quick one has rows 1, 2, 10 and 25 in `tests/drill/test_fault_matrix.py`
def test_s4_14_killed_at_random_steps_ddp_ends_with_the_same_bits(scene, clean):
    seed = random.SystemRandom().randrange(10**6)
    kills = random_kills(seed, count=2)
    run = scene.run(f"killed-{seed}", *drill(*kills))
    assert_same_end(run, clean)
    assert [event.fault for event in run.of(log.FaultInjected)] == kills, f"seed {seed}"
    assert run.finished.restarts == 2
    # It saves every 4 steps, and the newest save may still be on its way.
    assert all(event.steps_lost < 8 for event in run.of(log.Recovered))


@pytest.mark.slow  # the quick one is in `tests/run/test_sharded_recovery.py`
def test_s4_14_killed_at_random_steps_fsdp2_ends_with_the_same_bits(scene, clean_fsdp2):
    seed = random.SystemRandom().randrange(10**6)
    run = scene.run(f"killed-fsdp2-{seed}", *FSDP2, *drill(*random_kills(seed, count=1)))
    assert_same_end(run, clean_fsdp2)
    assert run.finished.restarts == 1


def test_killed_while_a_checkpoint_is_written_no_step_is_lost_and_it_is_written_anew(scene, clean):
    run = scene.run("killed-in-save", *drill("rank=1@step=8@save"))
    assert_same_end(run, clean)
    (recovered,) = run.of(log.Recovered)
    assert recovered.steps_lost == 0
    (failed,) = run.of(log.CheckpointFailed)
    assert failed.step == 8
    assert not [name for name in run.checkpoints if name.endswith(".tmp")]


def test_a_kill_from_outside_at_any_moment_is_recovered_from(scene, clean):
    process = scene.start("outside")
    record = scene.record("outside")
    pause = random.SystemRandom().uniform(0.0, 0.3)
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    time.sleep(pause)
    victim = record.of(log.WorkerStarted)[1]
    os.kill(victim.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_end(record, clean)
    lost = record.of(log.WorkerLost)
    if lost:  # the run may have been through before the kill
        assert (lost[0].rank, lost[0].how) == (victim.rank, "killed by SIGKILL")


@pytest.mark.slow  # the quick one is in `tests/run/test_sharded_recovery.py`
def test_a_killed_agent_takes_its_workers_along_and_the_node_comes_back(scene, clean):
    two_nodes = ("--set", "cluster.nodes=2", "--set", "cluster.per_node=1")
    process = scene.start("node", *two_nodes)
    record = scene.record("node")
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    first = record.of(log.WorkerStarted)[0]
    agent = agent_of(first.pid)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_alive(first.pid), what="the agent's worker to die")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert_same_end(record, clean)
    assert record.of(log.WorkerLost)[0].how == f"node {first.node} is lost"


LONG = ("--set", "train.steps=300", "--set", "checkpoint.every=100")
"""Some seconds of training: it is still going on when something is done to it from outside."""


@pytest.fixture(scope="module")
def clean_long(scene: Scene) -> Record:
    return scene.run("clean-long", *LONG)


@pytest.mark.slow  # the quick ones are in `tests/run/test_controller.py`
def test_s1_17_a_killed_command_leaves_no_orphan_and_the_run_goes_on_when_resumed(
    scene, clean_long
):
    process = scene.start("controller", *LONG, "--set", "recovery.lease=1")
    record = scene.record("controller")
    wait_until(lambda: len(record.all_metrics) >= 5, what="the fifth step")
    pids = [event.pid for event in record.of(log.WorkerStarted)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    wait_until(lambda: not any(map(is_alive, pids)), what="the workers to end")
    resumed = scene.resume("controller")
    assert_same_end(resumed, clean_long)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_does_not_stop_training_and_the_last_good_checkpoint_stays(scene, clean):
    disk = scene.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1000k", "tmpfs", str(disk)], check=True)
    try:
        run = scene.run("disk", "--allow", "checkpoint-room", code=6)
        assert "NOT SAVED" in run.output
        assert run.digest == clean.digest
        assert run.of(log.CheckpointSaved)
        failed = run.of(log.CheckpointFailed)
        assert failed
        assert "no space left" in failed[0].reason.lower()
        assert [name for name in run.checkpoints if not name.endswith(".tmp")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_fifty_random_kills_all_end_with_the_same_bits(scene, clean, clean_fsdp2):
    for seed in range(25):
        run = scene.run(f"soak-{seed}", *drill(*random_kills(seed, count=2)))
        assert_same_end(run, clean)
        run = scene.run(f"soak-fsdp2-{seed}", *FSDP2, *drill(*random_kills(seed, count=2)))
        assert_same_end(run, clean_fsdp2)


def test_nobody_reading_the_output_does_not_stop_the_run(scene, clean):
    process = scene.start("unread")
    process.stdout.close()
    assert process.wait(timeout=600) == 0
    assert_same_end(scene.record("unread"), clean)


@pytest.mark.slow  # the quick one is in `tests/run/test_controller.py`
def test_a_run_whose_controller_was_killed_cannot_be_started_twice(scene, clean_long):
    process = scene.start("twice", *LONG)
    record = scene.record("twice")
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    resumed = scene.resume("twice")  # at once, while the old workers are still at work
    assert_same_end(resumed, clean_long)
    generations = [line.generation for line in resumed.all_metrics]
    assert generations == sorted(generations)


@pytest.mark.slow  # the quick one has a controller that hangs, in `tests/run/test_controller.py`
def test_an_agent_that_does_not_answer_is_ended_by_force(scene):
    process = scene.start("stopped-agent")
    record = scene.record("stopped-agent")
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    first = record.of(log.WorkerStarted)[0]
    agent = agent_of(first.pid)
    os.kill(agent, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert not is_alive(first.pid)


def test_a_damaged_run_folder_hides_no_other_run(scene, clean):
    listed = scene.folder / "listed"
    for name in ("one", "two"):
        (listed / name).mkdir(parents=True)
        for file in ("run.json", "job.yaml", "plan.json"):
            (listed / name / file).write_bytes((clean.folder / file).read_bytes())
    (listed / "one/plan.json").write_text("{")
    done = scene.paceline("runs", "--runs", "listed")
    assert done.returncode == 0, done.stderr
    assert "damaged" in done.stdout
    assert "two" in done.stdout
