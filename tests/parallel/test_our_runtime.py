"""The search offers our own runtime only what `paceline run` does, and refuses the rest early."""

from pathlib import Path

import numpy as np
import pytest

from paceline.errors import Problem
from paceline.job import Job, parse_job
from paceline.parallel import Space, check_layout_choices, reasons_ours_cannot
from paceline.parallel.candidates import candidates
from paceline.parallel.layout_laws import (
    check_expert_ranks,
    check_nesting,
    check_offload_of,
    check_sample,
    check_schedule,
)
from paceline.plan.search_inputs import space_of
from paceline.profile import resolve_profile
from paceline.topology import Machine, find_cluster

JOB = """\
model: {decoder: {layers: 8, hidden: 64, heads: 4, kv_heads: 2}}
data: {path: x, seq_len: 64}
cluster: {accelerator: H100-SXM, per_node: 8}
train: {global_batch: 64, steps: 100}
"""
HERE = Machine(
    num_cores=4,
    clock_hz=2.6e9,
    simd_bytes=64,
    has_bf16=True,
    memory_bytes=2**34,
    available_bytes=2**34,
    gpus=(),
)


def job_of(*overrides: str) -> Job:
    return parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=overrides)


def space(job: Job) -> Space:
    return space_of(job, find_cluster(job.spec.cluster, job, HERE), resolve_profile(job))


def problems(*overrides: str) -> list[Problem]:
    job = job_of(*overrides)
    return list(check_layout_choices(job, space(job)))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.global_batch=24", "data.seq_len=48"),
        ("model.decoder.layers=5", "cluster.per_node=4"),
        ("layout.schedule=zero-bubble",),
        ("layout.schedule=dualpipe-v", "model.decoder.layers=12"),
        ("layout.offload=cpu",),
        ("layout.offload=cpu", "cluster.per_node=1"),
        ("model={preset: mixtral-8x7b}",),
        ("model={preset: gpt2}", "cluster={accelerator: cpu, per_node: 4}"),
    ],
)
def test_every_layout_that_is_offered_is_one_that_the_runtime_takes(overrides: tuple[str, ...]):
    asked = space(job_of(*overrides))
    profile = asked.profile
    (block, *_) = profile.blocks
    table = candidates(asked)
    assert len(table)
    some = np.arange(0, len(table), max(1, len(table) // 1500))
    for index in some:
        layout = table.row(int(index))
        found = [*reasons_ours_cannot(layout), *check_offload_of(layout), *check_nesting(layout)]
        found += [*check_expert_ranks(layout), *check_schedule(layout, profile.num_blocks)]
        found += check_sample(profile.seq_len or 1, block.heads, block.kv_heads, layout)
        assert not found, layout


def test_zero_bubble_has_one_stage_a_rank_two_in_a_v_or_more_in_a_loop():
    table = candidates(space(job_of("layout.schedule=zero-bubble", "layout.pipeline=2")))
    assert set(table.chunks.tolist()) == {1, 2, 4}
    assert not problems("layout.schedule=zero-bubble", "layout.pipeline=2", "layout.chunks=2")
    assert problems("layout.schedule=dualpipe-v", "layout.pipeline=2", "layout.chunks=2")


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (("layout.sharding=zero2", "layout.pipeline=2"), "L012"),
        (("layout.recompute=selective", "layout.schedule=zero-bubble"), "L022"),
        (("layout.offload=cpu", "layout.sharding=none"), "L024"),
        (("layout.offload=nvme",), "L012"),
        (("layout.tensor=2", "data.seq_len=63"), "L021"),
        (("layout.tensor=2", "model.decoder.kv_heads=1"), "L005"),
        (("layout.context=4", "data.seq_len=36"), "L009"),
        (("layout.context=4", "data.seq_len=34", "layout.context_kind=ulysses"), "L009"),
    ],
)
def test_what_the_runtime_would_refuse_is_refused_by_the_plan(
    overrides: tuple[str, ...], code: str
):
    assert [problem.code for problem in problems(*overrides)] == [code]


def test_the_field_that_asked_for_offloading_is_named():
    (problem,) = problems("layout.offload_parameters=true", "layout.sharding=none")
    assert problem.code == "L024"
    assert problem.what.startswith("layout.offload_parameters is True")
    assert problem.fix.startswith("leave layout.offload_parameters out")


def test_ulysses_divides_the_tokens_once_and_a_ring_twice():
    assert not problems("layout.context=4", "data.seq_len=36", "layout.context_kind=ulysses")
    assert problems("layout.context=4", "data.seq_len=36", "layout.context_kind=ring")


@pytest.mark.parametrize(
    ("preset", "axes"), [("bloom-176b", set()), ("gpt2", {"tensor", "pipeline", "context"})]
)
def test_on_this_machine_a_model_is_split_only_as_the_runtime_knows(preset: str, axes: set[str]):
    overrides = ("data.seq_len=512", "cluster={accelerator: cpu, per_node: 4}")
    table = candidates(space(job_of(f"model={{preset: {preset}}}", *overrides)))
    found = {name for name in ("tensor", "pipeline", "context") if (getattr(table, name) > 1).any()}
    assert found == axes


def test_a_model_that_cannot_be_split_so_is_refused_when_the_degree_is_fixed():
    here = ("model={preset: bloom-176b}", "cluster={accelerator: cpu, per_node: 4}")
    (problem,) = problems("layout.tensor=2", *here)
    assert problem.code == "L012"
    assert "no tensor parallelism" in problem.what
