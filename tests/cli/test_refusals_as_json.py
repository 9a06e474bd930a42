"""With `--json` a program reads standard output alone: refusals are there too."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.command import run_command

JOB = {
    "model": {"decoder": {"layers": 2, "hidden": 64, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 32},
    "cluster": {"accelerator": "H100-SXM", "nodes": 1, "per_node": 2},
    "train": {"global_batch": 8, "steps": 5},
    "layout": {"sharding": "none", "tensor": 2},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


def say(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command(*map(str, words), folder=Path.cwd())


def test_an_engines_refusal_is_json_and_stays_text_on_standard_error(job):
    done = say("render", job, "--for", "tensorflow", "--json")
    assert done.returncode == 3
    (problem,) = json.loads(done.stdout)["problems"]
    assert set(problem) == {"code", "what", "where", "fix"}
    assert problem["code"] == "H002"
    assert problem["fix"] == "layout.tensor: 1"
    assert f"H002: {problem['what']}\n  where: {problem['where']}" in done.stderr


@pytest.mark.parametrize("contract", ["002", "004"])
def test_s2_1_a_contract_for_a_job_that_does_not_fit_is_answered_with_what_it_needs(job, contract):
    big = ("--set", "model.preset=llama-3-70b", "--set", "model.decoder=null")
    done = say("plan", job, *big, "--set", "layout.tensor=auto", "--contract", contract)
    assert done.returncode == 3, done.stderr
    answer = json.loads(done.stdout)
    assert answer["success"] is False
    assert answer["phase"] == "resource-assessment"
    assert answer["requiredResources"]["minGPUs"] > 2
    assert [each["code"] for each in answer["problems"]] == ["P001"]
    assert "P001: no layout fits" in done.stderr


def test_s2_1_a_contract_for_a_job_file_that_is_wrong_is_answered_with_its_problems(job):
    done = say("plan", job, "--contract=002", "--set", "train.steps=0")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert (answer["success"], len(answer["problems"])) == (False, 1)


def test_a_job_file_that_is_wrong_names_every_problem(job):
    done = say("plan", job, "--json", "--set", "train.steps=0", "--set", "train.global_batch=x")
    assert done.returncode == 2
    assert len(json.loads(done.stdout)["problems"]) == 2


def test_a_command_line_that_is_wrong_has_no_code(job):
    done = say("render", job, "--json", "--fro", "slurm")
    assert done.returncode == 2
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["code"] is None
    assert "--fro" in problem["what"]
    assert problem["fix"] == "see `paceline render --help`"
    assert "--fro" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("render", "nowhere.yaml", "--for", "slurm"),
        ("init", "--json"),  # which has no such option
        ("plan", "nowhere.yaml", "--", "--json"),
    ],
)
def test_without_json_nothing_is_on_standard_output(words):
    done = say(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr


def test_a_script_that_cannot_be_adapted_names_its_problems(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(1)\n")
    done = say("adapt", script, "--to", "ddp", "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert answer["problems"]
    for problem in answer["problems"]:
        assert set(problem) == {"code", "what", "where", "fix"}
        assert problem["code"] == "A002"
        assert problem["where"].startswith(f"{script}:")
