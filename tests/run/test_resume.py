"""Runs that are ended, damaged or held by another, and then resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.run.scene import Record, Scene, assert_same_end, wait_until

from paceline.record import events as log
from paceline.record.ownership import claim_control

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("runs"))


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


def test_s0_9_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    scene, eight_steps, clean_constant
):
    copy(eight_steps, "damaged")
    file = damage(scene.folder / "damaged/checkpoints/step-00000008")
    more = ("--set", "train.steps=12", "--set", "checkpoint.keep_last=1")
    resumed = scene.resume("damaged", *more)
    (refused,) = resumed.of(log.CheckpointRefused)
    assert refused.checkpoint == "step-00000008"
    assert file in refused.reason
    assert resumed.of(log.TrainingStarted)[-1].first_step == 5
    assert "step-00000008 refused" in resumed.output
    assert resumed.digest == clean_constant.digest
    # It is set aside, and does not count as one of those that are kept.
    assert resumed.checkpoints == ["step-00000008.refused", "step-00000012"]


def test_a_checkpoint_of_another_job_in_a_runs_folder_is_refused_by_its_digest(scene, eight_steps):
    copy(eight_steps, "mine")
    scene.run("theirs", "--set", "train.steps=8", "--set", "train.seed=7")
    name = "checkpoints/step-00000008"
    shutil.rmtree(scene.folder / "mine" / name)
    shutil.copytree(scene.folder / "theirs" / name, scene.folder / "mine" / name)
    allowed = ("--set", "train.steps=12", "--set", "cluster.per_node=1")
    resumed = scene.resume("mine", *allowed)
    (refused,) = resumed.of(log.CheckpointRefused)
    assert "step-00000008 is of another job: its digest is" in refused.reason
    assert resumed.of(log.TrainingStarted)[-1].first_step == 5


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_over_in_silence(
    scene, eight_steps
):
    copy(eight_steps, "ruined")
    for checkpoint in (scene.folder / "ruined/checkpoints").iterdir():
        damage(checkpoint)
    resumed = scene.resume("ruined", "--set", "train.steps=12", code=5)
    assert "step-00000004" in resumed.output


def test_s0_9_a_run_resumes_on_another_number_of_ranks(scene, eight_steps, clean_constant):
    copy(eight_steps, "narrow")
    resumed = scene.resume("narrow", "--set", "train.steps=12", "--set", "cluster.per_node=1")
    assert "equal to rounding" in resumed.output
    assert "layout.data was 2 and is 1" in resumed.output
    assert resumed.samples == clean_constant.samples
    assert resumed.metrics[-1].loss == pytest.approx(clean_constant.metrics[-1].loss, rel=1e-4)


def test_a_run_is_resumed_with_the_settings_of_a_job_file(scene, eight_steps, clean_constant):
    copy(eight_steps, "by-job")
    done = scene.paceline("run", "job.yaml", "--resume", "by-job", "--no-report", *CONSTANT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed     train.steps from 8 to 12\n" in done.stderr
    resumed = scene.record("by-job", done.stdout)
    assert resumed.of(log.TrainingStarted)[-1].first_step == 9
    assert resumed.digest == clean_constant.digest


def test_s0_9_a_run_resumed_with_a_longer_schedule_promises_no_undisturbed_run(scene, eight_steps):
    copy(eight_steps, "longer")
    resumed = scene.resume("longer", "--set", "train.steps=12", "--set", "train.schedule=linear")
    why = "train.schedule was constant and is linear, train.steps was 8 and is 12"
    (changed,) = resumed.of(log.ExactnessChanged)
    assert (changed.reason, resumed.finished.exactness) == (why, "different")
    assert f"exactness   different: {why}" in resumed.output


def test_a_run_resumed_with_another_micro_batch_is_numeric_everywhere(scene, eight_steps):
    copy(eight_steps, "cut")
    resumed = scene.resume("cut", "--set", "train.steps=12", "--set", "layout.micro_batch=1")
    why = "layout.micro_batch was 4 and is 1, layout.accumulation was 1 and is 4"
    (changed,) = resumed.of(log.ExactnessChanged)
    assert (changed.reason, resumed.finished.exactness) == (why, "numeric")
    assert f"exactness   numeric: {why}" in resumed.output
    assert f"numeric: {why}" in scene.paceline("status", "cut").stdout
    listed = json.loads(scene.paceline("runs", "--json", "--runs", ".").stdout)
    rows = listed["runs"] if isinstance(listed, dict) else listed
    assert {row["exactness"] for row in rows if row["run"] == "cut"} == {"numeric"}


def test_ctrl_c_saves_at_a_step_boundary_and_the_exit_code_says_so(scene):
    longer = ("--set", "train.steps=60")
    clean = scene.run("clean-longer", *longer)
    process = scene.start("interrupted", *longer)
    record = scene.record("interrupted")
    wait_until(lambda: len(record.all_metrics) >= 5, what="the fifth step")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "paceline run --resume interrupted" in output
    stopped_at = record.finished.step
    assert f"step-{stopped_at:08d}" in record.checkpoints
    resumed = scene.resume("interrupted")
    assert resumed.of(log.TrainingStarted)[-1].first_step == stopped_at + 1
    assert_same_end(resumed, clean)


def test_text_that_changed_since_the_run_began_is_not_trained_on(scene, eight_steps):
    copy(eight_steps, "changed")
    new = scene.folder / "text/new.txt"
    new.write_text("a new file\n")
    try:
        resumed = scene.paceline("run", "--resume", "changed", "--set", "train.steps=12")
    finally:
        new.unlink()
    assert resumed.returncode == 2
    assert "R006" in resumed.stderr


def test_a_run_that_is_going_on_cannot_be_resumed_by_another_and_keeps_its_job(scene):
    process = scene.start("held", "--set", "train.steps=800")
    record = scene.record("held")
    wait_until(lambda: len(record.all_metrics) >= 2, what="the second step")
    job = (record.folder / "job.yaml").read_text()
    second = scene.paceline("run", "--resume", "held", "--set", "train.steps=900")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 130
    assert second.returncode == 2
    assert "R004" in second.stderr
    assert (record.folder / "job.yaml").read_text() == job


def test_a_resume_that_waited_for_another_to_finish_says_so(scene, eight_steps, tmp_path):
    copy(eight_steps, "waited")
    record = scene.record("waited")
    last, aside = record.folder / "checkpoints/step-00000008", tmp_path / "aside"
    last.rename(aside)  # as it is before the other has saved it
    before = (record.folder / "events.jsonl").read_bytes()
    with claim_control(record.folder, patience_s=0.0):
        second = subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", "--resume", "waited"],
            cwd=scene.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = second.stdout.readline()  # it has looked, and found steps left
        assert "waiting for the command that had the run" in said
        time.sleep(1.5)
        assert second.poll() is None
        aside.rename(last)
    _, errors = second.communicate(timeout=600)
    assert second.returncode == 2
    assert "R008: the run has finished meanwhile" in errors
    assert (record.folder / "events.jsonl").read_bytes() == before


@pytest.mark.slow
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


def test_a_finished_run_is_not_started_again(scene, eight_steps):
    again = scene.paceline("run", "--resume", "eight")
    assert again.returncode == 2
    assert "R008" in again.stderr
    assert "is finished" in again.stderr
