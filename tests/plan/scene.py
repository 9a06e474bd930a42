"""Jobs and clusters made up for the planner's tests."""

from pathlib import Path

import pytest

from paceline.errors import PlanError, Problem
from paceline.job import Job, parse_job
from paceline.launch.plannable import can_run
from paceline.plan import Plan, make_plan
from paceline.profile import resolve_decoder, resolve_profile
from paceline.topology import Cluster, Machine, find_cluster

GIB = 2**30
JOB = """\
name: try
model: {preset: llama-3-8b}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 1000}
"""
TINY = """\
name: tiny
model: {decoder: {layers: 3, hidden: 128, heads: 4}}
data: {path: x, seq_len: 128}
cluster: {accelerator: cpu, per_node: 2}
train: {global_batch: 16, steps: 600, precision: fp32}
"""
HERE = Machine(
    num_cores=2,
    clock_hz=2.6e9,
    simd_bytes=64,
    has_bf16=True,
    memory_bytes=24 * GIB,
    available_bytes=22 * GIB,
    gpus=(),
)
GPT_175B = """\
name: gpt
model: {preset: gpt3-175b}
data: {path: x, seq_len: 2048}
cluster: {accelerator: A100-80, nodes: 8, per_node: 8}
train: {global_batch: 64, steps: 100}
engine: megatron
"""


def job_of(text: str = JOB, *overrides: str) -> Job:
    return parse_job(text, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def cluster_of(job: Job) -> Cluster:
    return find_cluster(job.spec.cluster, job, HERE)


def plan_of(text: str = JOB, *overrides: str) -> Plan:
    job = job_of(text, *overrides)
    model = resolve_profile(job), resolve_decoder(job)
    return make_plan(job, cluster_of(job), *model, can_run=can_run)


def refused_of(text: str, *overrides: str) -> Problem:
    with pytest.raises(PlanError) as caught:
        plan_of(text, *overrides)
    (problem,) = caught.value.problems
    return problem
