"""Measured MFU counts the same FLOPs against the same peak as the planned one."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.estimate import mfu_at
from paceline.job import parse_job
from paceline.plan import plan_job

JOB = """
model: {preset: llama-3-8b}
data: {seq_len: 8192, corpus: python-stdlib}
train: {global_batch: 64, steps: 10}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 8}
"""
PLAN = plan_job(parse_job(JOB, source="job.yaml", folder=Path()))


def test_a_step_as_long_as_planned_has_the_planned_mfu():
    estimate = PLAN.estimate
    assert mfu_at(estimate, estimate.step_s) == pytest.approx(estimate.mfu)
    assert mfu_at(estimate, 2 * estimate.step_s) == pytest.approx(estimate.mfu / 2)


def test_half_of_the_ranks_that_take_the_same_time_use_twice_as_much_of_their_peak():
    estimate = PLAN.estimate
    assert mfu_at(estimate, estimate.step_s, ranks_now=0.5) == pytest.approx(2 * estimate.mfu)


def test_it_is_unknown_where_the_plan_knows_no_peak():
    assert mfu_at(replace(PLAN.estimate, mfu=None), 1.0) is None
