"""Deterministic kernels are a setting, and the record says what follows from it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.job import parse_job
from paceline.plan import is_deterministic, plan_job
from paceline.runtime.determinism import set_deterministic

JOB = """
model: {{decoder: {{layers: 2, hidden: 64, heads: 4}}}}
data: {{corpus: python-stdlib, seq_len: 32}}
train: {{global_batch: 8, steps: 4{more}}}
cluster: {{accelerator: {where}, nodes: 1, per_node: 2}}
"""


@pytest.fixture
def torch_as_before(monkeypatch):
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize(
    ("where", "more", "wanted"),
    [
        ("cpu", "", True),
        ("H100-SXM", "", False),
        ("cpu", ", deterministic: false", False),
        ("H100-SXM", ", deterministic: true", True),
    ],
)
def test_left_open_it_is_on_for_cpus_and_off_for_gpus(where, more, wanted):
    job = parse_job(JOB.format(where=where, more=more), source="job.yaml", folder=Path())
    assert is_deterministic(job, plan_job(job)) is wanted


@pytest.mark.usefixtures("torch_as_before")
def test_on_raises_for_unordered_kernels_and_gives_cublas_its_workspaces():
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.usefixtures("torch_as_before")
def test_off_leaves_torch_its_fastest_kernels():
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_run_without_it_promises_less_from_the_start():
    from paceline.launch.attached import _setup
    from paceline.record.history import History

    job = parse_job(
        JOB.format(where="cpu", more=", deterministic: false"), source="job.yaml", folder=Path()
    )
    plan = plan_job(job)
    assert _setup(job, plan, [], History(is_script=False)).exactness == "numeric"
    exact = replace(
        job, spec=replace(job.spec, train=replace(job.spec.train, deterministic="auto"))
    )
    assert _setup(exact, plan, [], History(is_script=False)).exactness == "bitwise"
