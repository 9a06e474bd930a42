"""Micro-batches tried for real, in a process with a memory limit."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli import cli
from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.launch.try_batch import check_measurable, try_batch
from paceline.plan import Plan, plan_job

JOB = """\
model: {decoder: {layers: 2, hidden: 64, heads: 2}}
data: {path: x, seq_len: 256}
cluster: {accelerator: cpu, per_node: 1}
train: {global_batch: 8, steps: 10, precision: fp32}
"""
MIB = 2**20


def planned(*overrides: str) -> tuple[Job, Plan]:
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)
    return job, plan_job(job)


@pytest.mark.slow  # the quick one searches, below
def test_a_step_is_run_and_its_memory_measured():
    job, plan = planned()
    peak = try_batch(job, plan, 2, limit_bytes=4096 * MIB)
    assert peak is not None
    assert 50 * MIB < peak < 2048 * MIB


def test_a_micro_batch_over_the_limit_does_not_fit_and_harms_nothing():
    job, plan = planned()
    assert try_batch(job, plan, 4096, limit_bytes=600 * MIB) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster={accelerator: H100-SXM, nodes: 2}", "train.global_batch=64"), "is declared"),
        (("cluster.per_node=2", "layout.sharding=full"), "holds a part of the model"),
    ],
)
def test_what_one_process_cannot_hold_is_not_measured(overrides: tuple[str, ...], said: str):
    with pytest.raises(JobError) as caught:
        check_measurable(*planned(*overrides))
    (problem,) = caught.value.problems
    assert problem.code == "J024"
    assert said in problem.what


def test_s4_8_the_batch_finder_measures_when_asked_to(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    line = ["advise", "batch", str(path), "--measure", "--limit", "2", "--json"]
    done = CliRunner().invoke(cli, line)
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["known"], found["largest"], found["at_limit"]) == ("measured", 2, True)
