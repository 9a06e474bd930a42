"""`paceline plan` reports what keeps the files of the job's engine from being written."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import cli

JOB = """\
model: {preset: falcon-7b}
data: {path: x, seq_len: 1024}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 100}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def plan(job_file: Path, engine: str, *words: str):
    return CliRunner().invoke(cli, ["plan", str(job_file), "--set", f"engine={engine}", *words])


def test_a_model_that_the_engines_files_do_not_describe_is_said_below_the_plan(job_file):
    done = plan(job_file, "megatron", "--json")
    assert json.loads(done.stdout)["engine"] == "megatron"
    (problem,) = done.exception.problems
    assert (problem.code, done.exception.exit_code) == ("H002", 3)
    assert problem.what.startswith("megatron cannot express the model falcon-7b")
    assert problem.fix.startswith("set engine to accelerate or deepspeed")
    assert plan(job_file, "deepspeed").exit_code == 0


def test_such_a_model_is_said_before_what_would_make_it_fit(job_file):
    one = ("--set", "cluster.accelerator=T4", "--set", "cluster.per_node=1")
    done = plan(job_file, "megatron", *one)
    assert [each.code for each in done.exception.problems] == ["H002", "P001"]


def test_an_engine_whose_files_can_be_written_says_nothing(job_file):
    for model in ("llama-3-8b", "falcon-7b"):
        done = plan(job_file, "deepspeed", "--set", f"model.preset={model}")
        assert (done.exit_code, done.stderr) == (0, "")


def test_a_model_that_the_example_program_lacks_is_a_note(job_file):
    length = ("--set", "data.seq_len=512")
    done = plan(job_file, "deepspeed", "--set", "model.preset=bert-large", *length)
    assert done.exit_code == 0
    assert done.stderr.startswith("note: H002: deepspeed cannot express the model bert-large")
    assert "paceline run --script train.py --with" in done.stderr


def test_an_engine_without_files_is_named(job_file):
    done = plan(job_file, "maxtext")
    assert done.exit_code == 0
    assert "no launcher for the engine maxtext, and Paceline writes no files" in done.stderr
