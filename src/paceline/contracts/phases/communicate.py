"""Phases 5 and 6: how ranks talk, and how gradients become one."""

from typing import Any

from paceline.contracts.nulls import with_null_reasons
from paceline.contracts.operate import backend, backends, init_method, sums_in, weights_in
from paceline.contracts.phases.case import Case
from paceline.contracts.phases.split import communication_of
from paceline.plan.advice.buckets import advise_buckets
from paceline.render.environment import environment
from paceline.units import format_seconds

_COMMUNICATION = ("tensor", "context", "expert", "pipeline", "data")
_BACKWARD_SHARE = 2 / 3
"""Share of the compute that the backward pass takes: it does twice the forward's
multiplications."""
_HOP_S = 20e-6
"""Seconds of a ring's hop over a network, launch included: a guess."""


def plan_communication(case: Case) -> dict[str, Any]:
    """Backend, buckets and overlap, with what communication is estimated to take."""
    plan, layout, cluster = case.plan, case.plan.layout, case.plan.cluster
    step_s = plan.estimate.step_s
    exposed = sum(plan.estimate.terms.get(name, 0.0) for name in _COMMUNICATION)
    share = None if not step_s else exposed / step_s
    bucket, why = _buckets(case)
    links = [level.link for level in cluster.levels]
    found = {
        "backend": backend(plan),
        "optimizations": _optimizations(case),
        "backendConfiguration": {
            "initMethod": init_method(plan, case.job),
            "backends": backends(plan),
            "timeout": "600s: NCCL's default; a silent rank is found earlier by its missing steps"
            if cluster.backend == "nccl"
            else f"{backend(plan)}'s own; a silent rank is found earlier by its missing steps",
            "env": {each.name: each.value for each in environment(plan)},
        },
        "compression": _compression(case),
        "gradientBucketing": why,
        "gradientBucketMB": bucket,
        "overlap": "the reduction of a block's gradients runs while earlier blocks go backward"
        if layout.data * layout.context > 1
        else "nothing to overlap: one data rank",
        "topology": " inside, then ".join(links) if links else "one rank",
        "hierarchical": {
            "intra": links[0] if links else "none",
            "inter": plan.cluster.network_link or "none",
        },
        "estimatedCommunicationOverhead": "unknown: the step's time is"
        if share is None
        else f"{share:.1%} of the step waits for communication or an idle stage "
        f"({format_seconds(exposed)}, estimated)",
        "estimatedCommunicationOverheadShare": share,
    }
    untimed = "the step's time is unknown"
    reasons = {"gradientBucketMB": why, "estimatedCommunicationOverheadShare": untimed}
    return with_null_reasons(found, reasons)


def _compression(case: Case) -> str:
    asked, kind = case.job.spec.train.gradient_compression, sums_in(case.plan, case.job)
    if asked == "none":
        return f"none: gradients are added up in {kind}"
    zeroes = ", which zeroes elements below 3e-5 on 1024 ranks: it casts before it divides"
    return f"{asked}: gradients are sent in {kind}{zeroes if asked == 'fp16' else ''}"


def _optimizations(case: Case) -> list[str]:
    layout, cluster = case.plan.layout, case.plan.cluster
    found = []
    if layout.sharding == "none" and layout.data > 1:
        found.append("gradient_as_bucket_view: gradients live in the buckets, one copy less")
        if layout.accumulation > 1:
            found.append(
                f"no_sync for {layout.accumulation - 1} of {layout.accumulation} micro-batches"
            )
    if layout.sharding in ("zero2", "full", "hybrid"):
        found.append("the next block's parameters are gathered while this one computes")
        if layout.accumulation > 1 and not layout.reduce_every_micro_batch:
            found.append("gradients are reduced once a step and kept whole in between")
    if layout.tensor > 1:
        inside = layout.tensor <= cluster.ranks_per_node
        found.append(
            f"tensor groups of {layout.tensor} " + ("inside a node" if inside else "ACROSS nodes")
        )
    if case.plan.cluster.uses_rdma:
        found.append("GPUDirect RDMA, which NCCL finds itself")
    return found or ["none is needed"]


def _buckets(case: Case) -> tuple[int | None, str]:
    plan, layout, cluster = case.plan, case.plan.layout, case.plan.cluster
    if layout.data == 1:
        return None, "none: one data rank"
    if layout.sharding not in ("none", "zero1"):
        return None, "none: FSDP reduces a block at a time"
    compute = plan.estimate.terms.get("compute")
    rate = cluster.network_bytes_per_s if cluster.num_nodes > 1 else cluster.link_bytes_per_s
    if not compute or not rate:
        return None, "the default of 25 MiB: times or links are unknown"
    advice = advise_buckets(
        gradient_bytes=4 * plan.profile.num_trained_parameters // layout.pipeline // layout.tensor,
        backward_s=compute * _BACKWARD_SHARE / layout.accumulation,
        ranks=layout.data,
        bytes_per_s=rate / (cluster.ranks_per_node if cluster.num_nodes > 1 else 1),
        latency_s=_HOP_S,
    )
    size = advice.bucket_cap_mb
    # The advice's own model has another ring than the estimate: its seconds are not the plan's.
    return size, (
        ("the default of 25 MiB" if size is None else f"{size} MiB")
        + f" a bucket: {format_seconds(plan.estimate.terms['data'])} of the reduction is exposed "
        "(the plan's estimate)"
    )


def synchronise_gradients(case: Case) -> dict[str, Any]:
    """How the gradients of all samples become one step."""
    plan, layout, train = case.plan, case.plan.layout, case.job.spec.train
    sharded = layout.sharding in ("full", "hybrid", "zero2")
    is_fp16 = str(plan.precision) == "fp16"
    kind = sums_in(plan, case.job)
    return {
        "synchronizationMethod": "synchronous-allreduce",
        "allReduceStrategy": (
            f"reduce-scatter in {kind}, each rank updates its shard, parameters are gathered"
            if sharded
            else f"all-reduce in {kind}, the algorithm is NCCL's choice"
            if plan.cluster.backend == "nccl"
            else f"all-reduce in {kind}"
        ),
        "accumulation": {
            "steps": layout.accumulation,
            "microBatch": layout.micro_batch,
            "globalBatch": layout.global_batch,
            "equation": f"{layout.global_batch} = {layout.micro_batch} x {layout.accumulation} x "
            f"{layout.data} data ranks",
        },
        "clipping": {"globalNorm": train.clip_norm, "over": "all parameters on all ranks"},
        "mixedPrecision": {
            "compute": plan.precision,
            "parameters": weights_in(plan),
            "reduce": kind,
            "lossScale": "dynamic" if is_fp16 else "none",
            "dynamic": is_fp16,
        },
        "stragglerHandling": "every step waits for the slowest rank"
        + (": vote_s in metrics.jsonl shows how long" if case.seen.shows("vote_s") else ""),
        "stalenessBound": 0,
        "optimizerStateSync": (
            f"each of {layout.shard_degree} ranks holds its shard, nothing is synchronised"
            if layout.shard_degree > 1
            else "every rank makes the same update from the same gradients"
        ),
        "tradeoffs": [
            f"{communication_of(case)['allReduceVolume']}",
            (
                "local SGD and DiLoCo would talk more rarely and train another algorithm; "
                "parameter servers and decentralised SGD are not available here"
            ),
        ],
    }
