"""Runs that are killed, interrupted or damaged, against one that is left alone."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.run.scene import Record, Scene, agent_of, is_alive, wait_until

from paceline.record import events as log
from paceline.record.holding import claim_control

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


def assert_same_end(run: Record, clean: Record) -> None:
    """Equal to the bit, and every sample consumed exactly once."""
    assert run.finished.outcome == "finished"
    assert run.digest == clean.digest
    assert run.samples == clean.samples
    assert run.metrics[-1].loss == clean.metrics[-1].loss


def test_an_undisturbed_run_is_the_same_every_time(scene, clean):
    again = scene.run("clean-again")
    assert_same_end(again, clean)
    assert not clean.of(log.WorkerLost)


def test_killed_at_random_steps_ddp_ends_with_the_same_bits(scene, clean):
    seed = random.SystemRandom().randrange(10**6)
    kills = random_kills(seed, count=2)
    run = scene.run(f"killed-{seed}", *drill(*kills))
    assert_same_end(run, clean)
    assert [event.fault for event in run.of(log.FaultInjected)] == kills, f"seed {seed}"
    assert run.finished.restarts == 2
    # It saves every 4 steps, and the newest save may still be on its way.
    assert all(event.steps_lost < 8 for event in run.of(log.Recovered))


def test_killed_at_random_steps_fsdp2_ends_with_the_same_bits(scene, clean_fsdp2):
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
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert_same_end(record, clean)
    lost = record.of(log.WorkerLost)
    if lost:  # the run may have been through before the kill
        assert (lost[0].rank, lost[0].how) == (victim.rank, "killed by SIGKILL")


def test_a_killed_agent_takes_its_workers_along_and_the_node_comes_back(scene, clean):
    two_nodes = ("--set", "cluster.nodes=2", "--set", "cluster.per_node=1")
    process = scene.start("node", *two_nodes)
    record = scene.record("node")
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    first = record.of(log.WorkerStarted)[0]
    agent = agent_of(first.pid)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not is_alive(first.pid), what="the agent's worker to die", timeout_s=5)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert_same_end(record, clean)
    assert record.of(log.WorkerLost)[0].how == f"node {first.node} is lost"


LONG = ("--set", "train.steps=300", "--set", "checkpoint.every=100")
"""Some seconds of training: it is still going on when something is done to it from outside."""


@pytest.fixture(scope="module")
def clean_long(scene: Scene) -> Record:
    return scene.run("clean-long", *LONG)


def test_a_killed_command_leaves_no_orphan_and_the_run_goes_on_when_resumed(scene, clean_long):
    process = scene.start("controller", *LONG, "--set", "recovery.lease=1")
    record = scene.record("controller")
    wait_until(lambda: len(record.all_metrics) >= 5, what="the fifth step")
    pids = [event.pid for event in record.of(log.WorkerStarted)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    wait_until(lambda: not any(map(is_alive, pids)), what="the workers to end", timeout_s=30)
    resumed = scene.resume("controller")
    assert_same_end(resumed, clean_long)


def test_ctrl_c_saves_at_a_step_boundary_and_the_exit_code_says_so(scene):
    longer = ("--set", "train.steps=60")
    clean = scene.run("clean-longer", *longer)
    process = scene.start("interrupted", *longer)
    record = scene.record("interrupted")
    wait_until(lambda: len(record.all_metrics) >= 5, what="the fifth step")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "paceline run --resume interrupted" in output
    stopped_at = record.finished.step
    assert f"step-{stopped_at:08d}" in record.checkpoints
    resumed = scene.resume("interrupted")
    assert resumed.of(log.TrainingStarted)[-1].first_step == stopped_at + 1
    assert_same_end(resumed, clean)


CONSTANT = ("--set", "train.schedule=constant")
"""The learning rate of a step does not depend on how many there will be."""


@pytest.fixture(scope="module")
def clean_constant(scene: Scene) -> Record:
    return scene.run("clean-constant", *CONSTANT)


@pytest.fixture(scope="module")
def eight_steps(scene: Scene) -> Record:
    """To be copied and gone on with."""
    return scene.run("eight", *CONSTANT, "--set", "train.steps=8")


def copy(run: Record, name: str) -> None:
    shutil.copytree(run.folder, run.folder.parent / name)


def damage(path: Path) -> str:
    """Flip a bit of the largest data file; returns its name."""
    target = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 0x10
    target.write_bytes(bytes(content))
    return target.name


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    scene, eight_steps, clean_constant
):
    copy(eight_steps, "damaged")
    file = damage(scene.folder / "damaged/checkpoints/step-00000008")
    more = ("--set", "train.steps=12")
    resumed = scene.resume("damaged", *more)
    (refused,) = resumed.of(log.CheckpointRefused)
    assert refused.checkpoint == "step-00000008"
    assert file in refused.reason
    assert resumed.of(log.TrainingStarted)[-1].first_step == 5
    assert "step-00000008 refused" in resumed.output
    assert resumed.digest == clean_constant.digest


def test_a_checkpoint_of_another_job_in_a_runs_folder_is_refused_by_its_digest(scene):
    scene.run("mine", *CONSTANT, "--set", "train.steps=4")
    scene.run("theirs", "--set", "train.steps=8", "--set", "train.seed=7")
    name = "checkpoints/step-00000008"
    shutil.copytree(scene.folder / "theirs" / name, scene.folder / "mine" / name)
    allowed = ("--set", "train.steps=12", "--set", "cluster.per_node=1")
    resumed = scene.resume("mine", *allowed)
    (refused,) = resumed.of(log.CheckpointRefused)
    assert "step-00000008 is of another job: its digest is" in refused.reason
    assert resumed.of(log.TrainingStarted)[-1].first_step == 5


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over_in_silence(scene):
    scene.run("ruined", "--set", "train.steps=4")
    damage(scene.folder / "ruined/checkpoints/step-00000004")
    resumed = scene.resume("ruined", "--set", "train.steps=8", code=5)
    assert "step-00000004" in resumed.output


def test_a_run_resumes_on_another_number_of_ranks(scene, eight_steps, clean_constant):
    copy(eight_steps, "narrow")
    resumed = scene.resume("narrow", "--set", "train.steps=12", "--set", "cluster.per_node=1")
    assert "equal to rounding" in resumed.output
    assert resumed.samples == clean_constant.samples
    assert resumed.metrics[-1].loss == pytest.approx(clean_constant.metrics[-1].loss, rel=1e-4)


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
        assert "step-00000004" in run.checkpoints
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_fifty_random_kills_all_end_with_the_same_bits(scene, clean, clean_fsdp2):
    for seed in range(25):
        run = scene.run(f"soak-{seed}", *drill(*random_kills(seed, count=2)))
        assert_same_end(run, clean)
        run = scene.run(f"soak-fsdp2-{seed}", *FSDP2, *drill(*random_kills(seed, count=2)))
        assert_same_end(run, clean_fsdp2)


def test_text_that_changed_since_the_run_began_is_not_trained_on(tmp_path):
    scene = Scene(tmp_path)
    scene.run("run", "--set", "train.steps=4")
    (tmp_path / "text/new.txt").write_text("a new file\n")
    resumed = scene.paceline("run", "--resume", "run", "--set", "train.steps=8")
    assert resumed.returncode == 2
    assert "R006" in resumed.stderr


def test_a_run_that_is_going_on_cannot_be_resumed_by_another_and_keeps_its_job(scene):
    process = scene.start("held", "--set", "train.steps=800")
    record = scene.record("held")
    wait_until(lambda: len(record.all_metrics) >= 2, what="the second step")
    job = (record.folder / "job.yaml").read_text()
    second = scene.paceline("run", "--resume", "held", "--set", "train.steps=900")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert second.returncode == 2
    assert "R004" in second.stderr
    assert (record.folder / "job.yaml").read_text() == job


def test_a_resume_that_waited_for_another_to_finish_says_so(tmp_path):
    scene = Scene(tmp_path)
    record = scene.run("run", "--set", "train.steps=8")
    last, aside = record.folder / "checkpoints/step-00000008", tmp_path / "aside"
    last.rename(aside)  # as it is before the other has saved it
    before = (record.folder / "events.jsonl").read_bytes()
    with claim_control(record.folder, patience_s=0.0):
        second = subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", "--resume", "run"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        second.stdout.readline()  # it has looked, and found steps left
        time.sleep(1.5)
        assert second.poll() is None
        aside.rename(last)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "R008: the run has finished meanwhile" in errors
    assert (record.folder / "events.jsonl").read_bytes() == before


def test_nobody_reading_the_output_does_not_stop_the_run(scene, clean):
    process = scene.start("unread")
    process.stdout.close()
    assert process.wait(timeout=90) == 0
    assert_same_end(scene.record("unread"), clean)


def test_damaged_checkpoints_are_set_aside_and_never_cost_a_good_one(tmp_path):
    scene = Scene(tmp_path)
    constant = ("--set", "train.schedule=constant", "--set", "checkpoint.keep_last=1")
    keep = ("--set", "checkpoint.keep_last=2")
    scene.run("run", *constant, *keep, "--set", "train.steps=8")
    damage(tmp_path / "run/checkpoints/step-00000008")
    resumed = scene.resume("run", "--set", "checkpoint.keep_last=1", "--set", "train.steps=12")
    assert resumed.checkpoints == ["step-00000008.refused", "step-00000012"]
    again = scene.resume("run", "--set", "train.steps=16")
    assert again.of(log.TrainingStarted)[-1].first_step == 13


def test_a_run_whose_controller_was_killed_cannot_be_started_twice(scene, clean_long):
    process = scene.start("twice", *LONG)
    record = scene.record("twice")
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    resumed = scene.resume("twice")  # at once, while the old workers are still at work
    assert_same_end(resumed, clean_long)
    generations = [line.generation for line in resumed.all_metrics]
    assert generations == sorted(generations)


def test_an_agent_that_does_not_answer_is_ended_by_force(scene, clean):
    process = scene.start("stopped-agent")
    record = scene.record("stopped-agent")
    wait_until(lambda: len(record.all_metrics) >= 3, what="the third step")
    first = record.of(log.WorkerStarted)[0]
    agent = agent_of(first.pid)
    os.kill(agent, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not is_alive(first.pid)


def test_a_finished_run_is_not_started_again(scene, clean):
    again = scene.paceline("run", "--resume", "clean")
    assert again.returncode == 2
    assert "R008" in again.stderr
    assert "is finished" in again.stderr


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
