"""Make the plan of a job: price every layout that is possible and choose one, with the case
against the rest.
"""

from dataclasses import replace
from typing import Literal

from paceline.errors import PlanError, Problem
from paceline.estimate import estimate
from paceline.parallel import candidates, check_layout_choices
from paceline.plan.choose import choose
from paceline.plan.decide import decide_intervals, decisions_of
from paceline.plan.decision import Plan
from paceline.plan.refuse import nothing_fits
from paceline.profile import (
    DecoderShape,
    ModelProfile,
    ModuleFacts,
    profile_decoder,
    profile_module,
    resolve_decoder,
)
from paceline.spec import Job
from paceline.topology import Cluster, find_cluster


def plan_job(job: Job, facts: ModuleFacts | None = None) -> Plan:
    """The plan of a job, on this machine or on the cluster it declares.

    Args:
        job: As `load_job` read it.
        facts: What a helper process counted of the module, for a job with `model.factory`.

    Raises:
        JobError: The model or the cluster cannot be what the job says.
        PlanError: The batch does not divide, or no layout fits in memory.
    """
    cluster = find_cluster(job.spec.cluster, job)
    decoder = resolve_decoder(job)
    if decoder is None:
        assert facts is not None, "a model.factory is measured before it is planned"
        return make_plan(job, cluster, profile_module(facts))
    kernels: Literal["gpu", "cpu"] = "gpu" if cluster.backend == "nccl" else "cpu"
    profile = profile_decoder(decoder, job.spec.data.seq_len, kernels=kernels)
    return make_plan(job, cluster, profile, decoder)


def make_plan(
    job: Job, cluster: Cluster, profile: ModelProfile, decoder: DecoderShape | None = None
) -> Plan:
    """Choose the fastest layout that fits, and keep the case against the rest.

    Raises:
        PlanError: The batch does not divide, or no layout fits in memory.
    """
    spec = job.spec
    problems = [*check_layout_choices(job, cluster.num_ranks), *_check_precision(job, cluster)]
    if problems:
        raise PlanError(*problems)
    precision = decide_precision(job, cluster)
    train = replace(spec.train, precision=precision)
    layouts = candidates(spec.train.global_batch, cluster.num_ranks, spec.layout)
    estimates = estimate(layouts, profile, cluster, train, profile.seq_len)
    choice = choose(layouts, estimates, usable_bytes=cluster.usable_bytes)
    if choice is None:
        raise nothing_fits(job, cluster, profile, layouts, estimates, precision)
    checkpoint_every, evaluate_every = decide_intervals(spec)
    return Plan(
        cluster=cluster,
        profile=profile,
        decoder=decoder,
        layout=choice.layout,
        estimate=choice.estimate,
        precision=precision,
        checkpoint_every=checkpoint_every,
        evaluate_every=evaluate_every,
        decisions=decisions_of(job, cluster, decoder, choice, precision),
        rejected=choice.rejected,
    )


def decide_precision(job: Job, cluster: Cluster) -> Literal["fp32", "bf16"]:
    """As asked; left open, bf16 on an accelerator that is known to have it."""
    asked = job.spec.train.precision
    if asked != "auto":
        return asked
    return "bf16" if cluster.backend == "nccl" and "bf16" in cluster.peak_flops_per_s else "fp32"


def _check_precision(job: Job, cluster: Cluster) -> list[Problem]:
    """A precision that the accelerator is known to lack; an unknown accelerator may have it."""
    lacks = cluster.peak_flops_per_s and "bf16" not in cluster.peak_flops_per_s
    if job.spec.train.precision != "bf16" or not lacks:
        return []
    return [
        Problem(
            code="L003",
            what=f"train.precision is bf16, and {cluster.accelerator} has no bf16",
            where=job.where("train.precision"),
            fix="set train.precision to fp32, or leave it at auto",
        )
    ]
