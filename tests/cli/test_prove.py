"""`paceline prove` from outside: a process that prints what fake ranks held."""

import json
from pathlib import Path

import pytest
from tests.command import run_command

JOB = """
model: {decoder: {layers: 2, hidden: 32, heads: 2, vocab: 256}}
data: {corpus: python-stdlib, seq_len: 32}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8}
train: {global_batch: 32, steps: 10}
layout: {sharding: full, tensor: 1, pipeline: 1, context: 1}
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def paceline(*arguments):
    return run_command(*map(str, arguments), folder=Path.cwd())


def test_prove_prints_memory_by_part_beside_the_estimate(job, tmp_path):
    trace = tmp_path / "step.json"
    done = paceline("prove", job, "--layout", "recompute=none", "--trace", trace)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fits        ")
    assert "rank 0 of 16" in done.stdout
    assert "in tensors at the peak, proved (estimate" in done.stdout
    assert "16 ranks between nodes" in done.stdout
    assert "a step, simulated" in done.stdout
    assert "stage 1 of 1" in done.stderr
    assert json.loads(trace.read_text())["traceEvents"]


def test_prove_gives_the_same_as_json(job):
    done = paceline("prove", job, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    (stage,) = data["proof"]["stages"]
    assert sum(stage["parts"].values()) == stage["peak_bytes"]
    assert data["fits"] is True
    assert data["proof"]["known"] == "proved"


def test_prove_says_what_is_wrong_with_the_job_before_anything_is_proved(job):
    done = paceline("prove", job, "--layout", "tensor=3")
    assert done.returncode == 3
    assert done.stderr.startswith("L00")
    assert "Traceback" not in done.stderr


def test_a_proof_of_another_engines_job_is_said_to_be_of_our_own_runtime(job):
    """examples/plan-70b, which Megatron runs, was said not to fit: our own runtime would not."""
    large = ("--set", "model.decoder.hidden=8192", "--set", "model.decoder.heads=64")
    large += ("--set", "model.decoder.layers=12", "--set", "engine=megatron")
    done = paceline("prove", job, *large, "--layout", "sharding=none")
    assert done.returncode == 0, done.stderr
    assert "engine      proved is Paceline's own runtime, not megatron" in done.stdout
    assert done.stdout.startswith("too large   ")
    assert "that a rank may use (Paceline's own runtime): " in " ".join(done.stdout.split())


@pytest.mark.slow  # much like the others
def test_a_layout_that_the_estimate_refuses_is_proved_when_it_is_fixed(job):
    large = ("--set", "model.decoder.hidden=8192", "--set", "model.decoder.heads=64")
    large += ("--set", "model.decoder.layers=12")
    done = paceline("prove", job, *large, "--layout", "sharding=none")
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("too large   ")
    assert "note: by the estimate this layout does not fit: " in done.stdout


def test_plan_proves_its_first_layouts_and_lists_them_anew(job):
    done = paceline("plan", job, "--prove", "2")
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split() == [
        "layout", "batch", "recompute", "simulated", "estimated", "proved", "estimate", "fits",
    ]  # fmt: skip
    assert len(rows) == 2


def test_plan_for_another_engine_says_whose_code_was_proved(job):
    megatron = ("--set", "engine=megatron", "--set", "layout.sharding=zero1")
    asked = ("plan", job, *megatron, "--prove", "1")
    done = paceline(*asked)
    assert done.stdout.startswith("proved is Paceline's own runtime, not megatron"), done.stderr
    (row,) = json.loads(paceline(*asked, "--json").stdout)
    assert (row["engine"], row["proved"]) == ("megatron", "paceline")
