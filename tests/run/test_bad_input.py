"""Bad input gets one screen with the numbers and the fix, an exit code, and never a traceback."""

import os
import socket
import subprocess

import pytest
import yaml
from tests.run.scene import Scene

from paceline.record import events as log


@pytest.fixture
def scene(tmp_path) -> Scene:
    return Scene(tmp_path)


def refused(done: "subprocess.CompletedProcess[str]", code: int, *texts: str) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) <= 24
    for text in texts:
        assert text in done.stderr
    return done.stderr


def test_a_missing_job_file_names_the_one_that_is_there(scene):
    refused(scene.paceline("run", "jbo.yaml"), 2, "J001", "there is no file", "job.yaml")


def test_a_yaml_error_names_its_line(scene):
    (scene.folder / "bad.yaml").write_text("name: x\nmodel: {decoder: [\ntrain: 3\n")
    refused(scene.paceline("plan", "bad.yaml"), 2, "J002", "line 4", "line 2")


def test_an_unknown_key_names_the_nearest_and_its_line(scene):
    scene.job["train"]["global_bach"] = 8
    scene.write_job()
    text = refused(scene.paceline("run", "job.yaml"), 2, "J004", "`global_batch`")
    lines = (scene.folder / "job.yaml").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "global_bach" in line)
    assert f"line {number}" in text


def test_every_problem_is_shown_at_once(scene):
    scene.job["train"] |= {"global_batch": -1, "steps": "many"}
    scene.job["modle"] = {}
    scene.write_job()
    text = refused(scene.paceline("plan", "job.yaml"), 2)
    assert text.count("fix:") == 3


def test_a_global_batch_that_does_not_divide_names_the_nearest_that_do(scene):
    done = scene.paceline(
        "run", "job.yaml", "--set", "train.global_batch=7", "--set", "layout.data=2"
    )
    refused(done, 3, "7", "2 ranks", "6", "8")


def test_a_data_path_without_files_says_where_it_looked(scene):
    done = scene.paceline("run", "job.yaml", "--set", "data.path=texts/*.md")
    refused(done, 2, "D001", "texts/*.md", str(scene.folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file_is_named(scene):
    (scene.folder / "text/0.txt").chmod(0)
    refused(scene.paceline("run", "job.yaml"), 2, "D002", "0.txt")


def test_a_folder_in_place_of_the_job_file_is_refused(scene):
    refused(scene.paceline("plan", "text"), 2, "J001", "directory")


def test_a_sequence_longer_than_the_data_says_both_lengths(scene):
    done = scene.paceline("run", "job.yaml", "--set", "data.seq_len=9000000")
    refused(done, 2, "D004", "9000001")


def test_an_output_folder_that_holds_another_run_is_left_alone(scene):
    held = scene.folder / "held"
    held.mkdir()
    (held / "run.json").write_text("{}")
    refused(scene.paceline("run", "job.yaml", "--out", "held"), 2, "R001", "--resume")
    assert (held / "run.json").read_text() == "{}"


def test_an_output_folder_with_files_is_left_alone(scene):
    refused(scene.paceline("run", "job.yaml", "--out", "text"), 2, "R001")
    assert len(list((scene.folder / "text").iterdir())) == 6


def test_a_port_in_use_is_named_before_anything_starts(scene):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        done = scene.paceline("run", "job.yaml", "--set", f"cluster.rendezvous_port={port}")
    refused(done, 2, "R012", str(port))
    assert not (scene.folder / "runs").exists()


def test_a_run_that_is_not_there_cannot_be_resumed(scene):
    refused(scene.paceline("run", "--resume", "runs/none"), 2, "R003")
    refused(scene.paceline("report", "runs/none"), 2, "W015")


def test_a_cluster_that_is_not_this_machine_is_planned_and_not_run(scene):
    scene.job["cluster"] = {"accelerator": "H100-SXM", "nodes": 4, "per_node": 8}
    scene.job["train"]["global_batch"] = 64
    scene.write_job()
    assert scene.paceline("plan", "job.yaml").returncode == 0
    refused(scene.paceline("run", "job.yaml"), 2, "R011", "H100-SXM")


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ("- a list\n", "keys and values"),
        ("", "`model` is missing"),
        ("model: 7\ntrain: 8\n", "section"),
        ("model: {decoder: {layers: 1, hidden: 7, heads: 2}}\n", "`train` is missing"),
        ("\tx: 1\n", "not YAML"),
        ("? [1, 2]\n: 3\n", ""),
        ("1: 2\n", ""),
    ],
)
def test_files_that_are_no_job_are_refused(scene, job, text):
    (scene.folder / "bad.yaml").write_text(job)
    refused(scene.paceline("plan", "bad.yaml"), 2, text)


@pytest.mark.parametrize(
    "override",
    [
        "train",
        "train.steps",
        "=5",
        "train.steps=0",
        "train..x=1",
        "model=7",
        "train.steps=[1",
        "a=b",
    ],
)
def test_overrides_that_make_no_sense_are_refused(scene, override):
    refused(scene.paceline("plan", "job.yaml", "--set", override), 2, "fix:")


def test_planning_needs_no_torch(scene):
    (scene.folder / "torch.py").write_text("raise ImportError('planning must not import torch')")
    code = "import sys; sys.path.insert(0, '.'); from paceline.cli import main; main()"
    for arguments in (["plan", "job.yaml"], ["--help"], ["schema"], ["runs"]):
        done = subprocess.run(
            [os.sys.executable, "-c", code, *arguments],
            cwd=scene.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_the_job_file_that_init_writes_can_be_planned(scene):
    made = scene.paceline("init", "new.yaml")
    assert made.returncode == 0, made.stderr
    written = (scene.folder / "new.yaml").read_text()
    assert len(written.splitlines()) <= 36
    refused(scene.paceline("init", "new.yaml"), 2, "J008", "--force")
    (scene.folder / "corpus").symlink_to(scene.folder / "text")
    assert scene.paceline("plan", "new.yaml").returncode == 0


def test_the_resolved_job_is_a_job_file_again(scene):
    done = scene.paceline("plan", "job.yaml", "--json")
    assert yaml.safe_load(done.stdout)["layout"]["data"] == 2


def test_a_fork_server_that_cannot_be_run_is_one_error_and_no_fault_of_the_node(scene, monkeypatch):
    monkeypatch.setenv("PACELINE_FORK_SERVER", "no_such_fork_server")
    record = scene.run("out", code=4)
    (lost,) = record.of(log.WorkerLost)
    assert lost.how.startswith("StartError: `python -m no_such_fork_server`")
    assert "No module named no_such_fork_server" in lost.how
    assert lost.cause == "exception"  # which counts against no node
    (end,) = record.of(log.RunFinished)
    assert end.reason == f"rank {lost.rank}: {lost.how} (before its first step)"
