"""The sixteen phases on a screen and in a folder; jobs read from either kind of file."""

import json
from pathlib import Path

import click
import pytest

from paceline.cli.job_input import read_job
from paceline.cli.phases import show_phases
from paceline.contracts.phases import Goals
from paceline.errors import JobError
from paceline.job import Job, parse_job

JOB = """\
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8}
train: {global_batch: 128, steps: 1000}
"""
CONTEXT = {
    "modelConfig": {"path": "llama-3-8b"},
    "dataConfig": {},
    "clusterConfig": {"numNodes": 1, "gpusPerNode": 8},
}


def job_of(*overrides: str) -> Job:
    return parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def test_a_folder_gets_every_file_and_a_second_time_only_what_changed(tmp_path: Path, capsys):
    out = tmp_path / "plan"
    assert show_phases(job_of(), out=out) == 0
    assert len(list(out.glob("phase*-*.json"))) == 16
    assert (out / "launch-script.sh").stat().st_mode & 0o111
    capsys.readouterr()
    assert show_phases(job_of(), out=out) == 0
    assert "unchanged" in capsys.readouterr().out


def test_one_phase_is_printed_as_json(capsys):
    assert show_phases(job_of(), only=11) == 0
    assert json.loads(capsys.readouterr().out)["globalBatchSize"] == 128


def test_all_phases_are_printed_as_json(capsys):
    show_phases(job_of(), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert len(found["phases"]) == 16
    assert found["gates"]


def test_without_a_folder_the_plan_is_printed_and_what_failed_is_said(capsys):
    assert show_phases(job_of(), goals=Goals(budget_usd=1.0), fail_on_gate=True, yes=True) == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("# Training plan")
    assert "P023" in printed.err


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(JobError, match="J025"):
        show_phases(job_of(), out=tmp_path)
    with pytest.raises(JobError, match="J025"):
        show_phases(job_of(), out=tmp_path / "mine.txt")


def test_a_phase_that_does_not_exist_is_a_usage_error():
    with pytest.raises(click.UsageError, match="1 to 16"):
        show_phases(job_of(), only=17)


def test_a_contract_is_read_like_a_job_file_and_says_what_it_assumed(tmp_path: Path, capsys):
    path = tmp_path / "input.json"
    path.write_text(json.dumps(CONTEXT))
    job = read_job(path, ["train.steps=5"])
    assert job.spec.model.preset == "llama-3-8b"
    assert job.spec.train.steps == 5
    assert "note: clusterConfig.gpuType is missing" in capsys.readouterr().err
    other = tmp_path / "job.yaml"
    other.write_text(JOB)
    assert read_job(other).spec.cluster.nodes == 2


def test_a_json_file_that_is_neither_contract_nor_job_is_named_as_that(tmp_path: Path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"modle": {}}))
    with pytest.raises(JobError, match="J020"):
        read_job(path)
