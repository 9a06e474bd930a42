"""Every fix of P001 and P002 is true: the job with that change has a plan that fits."""

import re
from collections.abc import Iterator

import pytest
from tests.plan.scene import JOB, job_of, plan_of, refused_of

from paceline.errors import PlanError, Problem
from paceline.plan.limits import limit_not_kept

ONE_4090 = ("cluster.accelerator=RTX-4090", "cluster.per_node=1")
NODES = "cluster={accelerator: A100-40, nodes: 13, per_node: 1, host_memory: 10GiB}"
INFEASIBLE = [
    (*ONE_4090, "model.preset=llama-2-7b", "engine=torchtitan"),
    (*ONE_4090, "model.preset=falcon-40b"),
    (*ONE_4090, "train.adapter={kind: lora, rank: 8}", "layout.offload=none", "engine=paceline"),
    ("engine=deepspeed", "model.preset=falcon-40b", "cluster.host_memory=300GiB"),
    ("cluster.nodes=2", "model.preset=llama-3-405b"),
    ("cluster={accelerator: M2-Ultra, per_node: 1, memory: 96GB}", "data.seq_len=2048"),
    (NODES, "engine=torchtitan", "model.preset=llama-2-70b", "train.global_batch=26"),
    ("cluster={accelerator: H100-SXM, memory: 8GiB}", "layout.offload=none"),
    ("layout.sharding=none", "engine=deepspeed", "cluster={accelerator: A10G, per_node: 4}"),
    ("layout.tensor=1", "layout.offload=none", "cluster={accelerator: T4, per_node: 4}"),
    ("layout.recompute=none", "data.seq_len=131072", "train.global_batch=8", *ONE_4090),
    ("plan.head_room=0.95", "model.preset=llama-3-70b", "engine=megatron"),
    ("plan={objective: ranks, max_ranks: 4}", "model.preset=llama-3-70b", "layout.offload=none"),
]


def changes_of(fix: str) -> Iterator[tuple[list[str], str]]:
    """Each change of a fix as overrides of the job, with the layout that it then has."""
    for way in fix.split("; or "):
        if way.startswith("try "):  # which promises nothing
            continue
        words, _, named = way.partition(": ")
        words = re.sub(r" \([^)]*\)", "", words).replace(
            "a folder on each node's own disk", "/disk"
        )
        left, _, rest = f" {words}".rpartition(" at auto")
        names = re.findall(r"([a-z_.]+)(?: and|$)", left.replace(" leave ", ""))
        sets = re.findall(r"([a-z]+\.[a-z_.]+|engine) to (\S+)", rest)
        assert names or sets, way
        yield [*(f"{n}=auto" for n in names), *(f"{n}={v}" for n, v in sets)], named


@pytest.mark.parametrize("words", INFEASIBLE, ids=" ".join)
def test_every_fix_of_p001_gives_a_job_that_fits_with_the_layout_it_names(words):
    problem = refused_of(JOB, *words)
    assert problem.code == "P001"
    for overrides, named in changes_of(problem.fix):
        plan = plan_of(JOB, *words, *overrides)
        if named:  # the layout of all ranks; for the objective `ranks` fewer may be taken
            assert named.startswith(plan.layout_name), overrides
            assert (f"{plan.layout.offloaded} on" in named) == (plan.layout.offload != "none")
        else:
            assert "objective" in " ".join(words)


LIMITS = [
    ("plan.budget=10",),
    ("plan={budget: 10, provider: lambda}",),
    ("plan.budget=12",),
    ("plan={budget: 10, spot: true}",),
    ("plan={deadline: 30m}", "train.steps=10000"),
    ("plan={deadline: 20m, objective: ranks}", "train.steps=2000"),
    ("plan={budget: 100, objective: cost}", "train.steps=9000", "model.preset=llama-3-70b"),
    ("plan={deadline: 3m}", "cluster.accelerator=L4", "train.steps=77"),
]


@pytest.mark.parametrize("words", LIMITS, ids=" ".join)
def test_every_fix_of_p002_gives_a_job_that_keeps_the_limit(words):
    tried = 0
    for overrides, _ in changes_of(missed(*words).fix):
        plan = plan_of(JOB, *words, *overrides)
        assert all(limit.is_kept for limit in plan.limits), overrides
        tried += 1
    assert tried


def missed(*words: str) -> Problem:
    try:
        plan = plan_of(JOB, *words)
    except PlanError as error:
        return error.problems[0]
    return limit_not_kept(job_of(JOB, *words), plan)
