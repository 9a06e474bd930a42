"""A person's own script under another engine's launcher: every process is counted."""

import json
from pathlib import Path

import pytest
from tests.run.scene import Record, Scene

PRINTS = """
import os, sys
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}", flush=True)
"""


def scene_with(folder: Path, text: str = PRINTS, **job: object) -> Scene:
    scene = Scene(folder)
    scene.job |= job
    scene.write_job()
    (folder / "train.py").write_text(text)
    return scene


def run(scene: Scene, *more: str, engine: str = "torchrun", code: int = 0) -> Record:
    options = ("--script", "train.py", "--with", engine, "--out", "run", "--no-report")
    done = scene.paceline("run", *options, *more)
    assert done.returncode == code, done.stdout + done.stderr + scene.logs("run")
    assert "Traceback" not in done.stderr
    return scene.record("run", done.stdout + done.stderr)


def failure(scene: Scene, *options: str) -> str:
    done = scene.paceline("run", *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.ranks
def test_a_script_runs_on_the_planned_ranks_with_its_arguments(tmp_path):
    scene = scene_with(tmp_path)
    run(scene, "job.yaml", "--", "--lr", "0.1")
    printed = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "rank 0 of 2 ['--lr', '0.1']" in printed
    assert "rank 1 of 2 ['--lr', '0.1']" in printed
    engine = tmp_path / "run" / "engine"
    assert sorted(each.name for each in (engine / "started").iterdir()) == ["0", "1"]
    assert json.loads((engine / "train.json").read_text())["batch"]["data_ranks"] == 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ('exec python3 "$TRAIN_SCRIPT"', "a process was started as one of 1, the plan has 2"),
        ("exit 0", "0 of 2 processes started the program"),
    ],
    ids=["one-process", "none"],
)
def test_a_launcher_that_starts_fewer_processes_is_no_success(tmp_path, lie, said):
    scene = scene_with(tmp_path, recovery={"max_restarts": 0})
    run(scene, "job.yaml")
    (tmp_path / "run" / "engine" / "launch.sh").write_text(lie)
    done = scene.paceline("run", "--resume", "run", "--no-report")
    assert done.returncode == 4
    assert f"H022: the launcher did not start the plan's ranks: {said}" in done.stderr
    assert scene.record("run").finished.outcome == "failed"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("job.yaml", "--with", "torchrun"), "--with goes with --script"),
        (("--script", "train.py", "--with", "torchrun"), "name a job file as well"),
        (
            ("--script", "train.py", "--with", "torchrun", "--nproc", "2", "job.yaml"),
            "leave --nproc out",
        ),
        (("--script", "gone.py", "--with", "torchrun", "job.yaml"), "R050: there is no script"),
        (("--script", "train.py", "--with", "slurm", "job.yaml"), "'slurm' is not one of"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, options, said):
    assert said in failure(scene_with(tmp_path), *options)


def test_a_plan_for_another_cluster_is_not_started_here(tmp_path):
    cluster = {"accelerator": "H100-SXM", "nodes": 2, "per_node": 8, "network": "400Gb/s"}
    scene = scene_with(tmp_path, cluster=cluster)
    scene.job["train"]["global_batch"] = 64
    scene.write_job()
    said = failure(scene, "--script", "train.py", "--with", "torchrun", "job.yaml")
    assert "H024: this is one machine, and the plan is for" in said
    assert not (tmp_path / "runs").exists()


def test_s0_7_an_engine_other_than_the_jobs_is_noted(tmp_path):
    """The plan was another engine's than the job names, and nothing said so."""
    scene = scene_with(tmp_path, engine="deepspeed")
    options = ("--script", "train.py", "--with", "accelerate", "job.yaml", "--dry-run")
    done = scene.paceline("run", *options)
    assert done.returncode == 0, done.stderr
    assert "note: planned for accelerate, not for deepspeed as the job says" in done.stderr


def test_a_job_file_without_an_engine_is_not_taken_as_an_argument(tmp_path):
    scene = scene_with(tmp_path)
    said = failure(scene, "--script", "train.py", "job.yaml")
    assert "did you mean --with ENGINE" in said
    assert not (tmp_path / "runs").exists()


def test_a_folder_is_no_script(tmp_path):
    scene = scene_with(tmp_path)
    (tmp_path / "code").mkdir()
    said = failure(scene, "--script", "code", "--out", "run")
    assert said.startswith("R050")
    assert "is a folder" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.ranks
def test_a_yaml_file_behind_the_dashes_is_the_scripts_own(tmp_path):
    scene = scene_with(tmp_path)
    done = scene.paceline(
        "run", "--script", "train.py", "--out", "run", "--no-report", "--", "job.yaml"
    )
    assert done.returncode == 0, done.stderr
    assert "['job.yaml']" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
