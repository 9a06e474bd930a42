"""Phases 1 and 2: what there is, and what the model is made of."""

from itertools import accumulate
from typing import Any

from paceline.choices.recomputes import WHOLE_BLOCKS
from paceline.contracts.nulls import with_null_reasons
from paceline.contracts.phases.case import Case
from paceline.contracts.phases.required import STATE_BYTES_PER_PARAMETER
from paceline.estimate.cost import training_flops
from paceline.parallel.stages import is_v_shaped, stages_of_rank
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.plan.caution import waits_for_messages
from paceline.prepare.checked import checked_text
from paceline.profile import ModelProfile
from paceline.units import (
    bytes_apart,
    format_amount,
    format_bytes,
    format_count,
    format_flops_per_s,
    format_seconds,
)

_NARROW = 0.1
"""Share of the usable memory below which what is left counts as scarce."""


def assess_resources(case: Case) -> dict[str, Any]:
    """Whether the cluster can train the job, and what it needs at the least."""
    cluster, view = case.plan.cluster, case.view
    rate = cluster.network_bytes_per_s if cluster.num_nodes > 1 else cluster.link_bytes_per_s
    demand = [cost for cost in view.costs if cost.way == "on demand"]
    cheapest = demand[0] if demand and case.feasible else None
    found: dict[str, Any] = {
        "feasible": case.feasible,
        "availableGPUs": cluster.num_ranks,
        "availableNodes": cluster.num_nodes,
        "minimumRequirements": minimum_of(case),
        "gpuType": cluster.accelerator,
        "memoryPerGPU": format_bytes(_memory_of(case)),
        "memoryPerGPUBytes": _memory_of(case),
        "interconnectType": case.plan.cluster.network_link or "inside one node",
        "interconnectBandwidth": _rate(rate),
        "interconnectBytesPerSecond": rate,
        "storageSystem": {
            "type": "must be seen by every node; which it is, the job does not say",
            "capacity": f"at least {format_bytes(case.required.storage_bytes)}",
            "throughput": (
                f"{format_bytes(view.assumptions.storage_bytes_per_s)}/s a node assumed: a "
                f"checkpoint is written in {format_seconds(view.write_s)}"
            ),
            "iops": None,
        },
        "computationalRequirements": _compute(case),
        "bottlenecks": bottlenecks_of(case),
        "dataQuality": checked_text(case.job),
        "deploymentOptions": [
            f"{cost.provider} {cost.instance} x {cost.num_instances}, {cost.way}: "
            f"${format_amount(cost.usd)} ({cost.as_of})"
            for cost in (view.costs[:5] if case.feasible else ())
        ],
        "estimatedCost": None
        if cheapest is None
        else f"${cheapest.usd:,.2f} on demand, {cheapest.provider}",
        "estimatedCostUSD": None if cheapest is None else cheapest.usd,
    }
    if case.refused is not None:
        found["refusal"] = str(case.refused)
    unpriced = (
        "no price on demand is known" if case.feasible else "the cluster cannot train the job"
    )
    alone = "one node uses no network" if cluster.num_nodes == 1 else "the step's time is unknown"
    bandwidth = ("minBandwidth", "minBandwidthBytesPerSecond")
    reasons = {
        **dict.fromkeys((f"minimumRequirements.{name}" for name in bandwidth), alone),
        "minimumRequirements.minGPUs": "no number of these accelerators that was tried fits: a "
        "fixed layout needs more memory in each",
        "computationalRequirements.FLOPs": "the length of the samples is unknown",
        "computationalRequirements.tokens": "the length of the samples is unknown",
        "computationalRequirements.peakPerGPU": "the catalog has no peak of this accelerator",
        "storageSystem.iops": "neither the job nor the catalog has it",
        "dataQuality": "no file of the job's data can be read here",
        "interconnectBytesPerSecond": "the rate of the links is unknown",
        **dict.fromkeys(("estimatedCost", "estimatedCostUSD"), unpriced),
        "computationalRequirements.GPUHours": "the hours of a run that cannot train are unknown"
        if not case.feasible
        else "the step's time is unknown",
    }
    return with_null_reasons(found, reasons)


def minimum_of(case: Case) -> dict[str, Any]:
    """The least that the job runs on, in the contract's words."""
    least = case.required
    return {
        "minGPUs": least.ranks,
        "minMemoryPerGPU": format_bytes(least.memory_bytes),
        "minBandwidth": None
        if least.network_bytes_per_s is None
        else f"{_rate(least.network_bytes_per_s)} a node",
        "minStorage": format_bytes(least.storage_bytes),
        "minMemoryPerGPUBytes": least.memory_bytes,
        "minBandwidthBytesPerSecond": least.network_bytes_per_s,
        "minStorageBytes": least.storage_bytes,
        "basis": least.basis,
    }


def bottlenecks_of(case: Case) -> list[dict[str, Any]]:
    """What limits the plan, from its memory and the terms of its step."""
    plan = case.plan
    found: list[dict[str, Any]] = []
    memory, usable = plan.estimate.memory.known_bytes, available_of(case)
    if not case.feasible or memory > usable * (1 - _NARROW):
        over = not case.feasible
        found.append(
            {
                "resource": "accelerator memory",
                "severity": "critical" if over else "medium",
                "impact": f"{' needed of '.join(bytes_apart(memory, usable))} a rank",
                "mitigation": "phase 7 lists what needs less",
            }
        )
    step_s = plan.estimate.step_s
    for name, seconds in sorted(plan.estimate.terms.items(), key=lambda term: -term[1]):
        if step_s and name not in ("compute", "optimizer") and seconds > _NARROW * step_s:
            share = seconds / step_s
            if name == "pipeline" and waits_for_messages(
                case_of_plan(plan), plan.layout, plan.estimate
            ):
                name = "pipeline messages"
            resource, mitigation = _LIMITS.get(name, (name, "measure it on a short run"))
            found.append(
                {
                    "resource": resource,
                    "severity": "high" if share > 0.3 else "medium",
                    "impact": f"{name} takes {share:.0%} of a step of {format_seconds(step_s)}",
                    "mitigation": mitigation,
                }
            )
    return found


_LIMITS = {
    "recompute": ("compute", "more memory a rank would do without recomputation"),
    "tensor": ("links inside a node", "a smaller tensor degree, where the memory allows it"),
    "context": ("network", "a faster network, or shorter samples"),
    "expert": ("network", "experts inside a node"),
    "pipeline": ("idle stages", "more micro-batches a step, or interleaved stages"),
    "pipeline messages": (
        "network between stages",
        "a faster network: most of it is waiting for messages",
    ),
    "data": (
        "network between data ranks",
        "a larger global batch, which reduces more rarely for each sample",
    ),
    "stragglers": ("slowest rank", "compare vote_s of the ranks, and take out the slow one"),
}
"""Term of a step -> what limits it, and what makes it shorter."""


def analyse_model(case: Case) -> dict[str, Any]:
    """What the model is made of, and where it can be cut."""
    plan, profile = case.plan, case.plan.profile
    layout = plan.layout
    state = STATE_BYTES_PER_PARAMETER * profile.num_trained_parameters
    activations = plan.estimate.memory.parts.get("activations")
    split = layout.tensor * layout.context * layout.pipeline
    whole = None if activations is None else state + activations * split
    fits = case.feasible and whole is not None and whole < plan.limit_bytes
    forward = profile.forward_flops_per_sample
    return {
        "modelSize": {
            "totalParameters": profile.num_parameters,
            "trainable": profile.num_trained_parameters,
            "memoryFootprint": f"{format_bytes(4 * profile.num_parameters)} in float32",
            "activationMemory": None
            if activations is None
            else f"{format_bytes(activations)} on the fullest rank in micro-batches of "
            f"{layout.micro_batch}, recompute {layout.recompute}",
            "optimizerMemory": f"{format_bytes(8 * profile.num_trained_parameters)} for two "
            "float32 moments",
            "totalMemoryRequired": f"{format_bytes(state)} of state"
            + ("" if whole is None else f", {format_bytes(whole)} with activations"),
            "totalMemoryRequiredBytes": whole,
        },
        "fitsInSingleGPU": fits,
        "requiresModelParallelism": split > 1,
        "requiresSharding": layout.shard_degree > 1,
        "layerAnalysis": _layers(profile),
        "partitionPoints": _edges(case.plan)[1:-1],
        "computationalProfile": {
            "forwardFLOPs": forward,
            "backwardFLOPs": None if forward is None else 2 * forward,
            "totalFLOPs": None if forward is None else 3 * forward,
            "per": "sample; recomputation adds at most one more forward pass",
        },
        "dataDependencies": [
            "every block needs the one before it",
            "the loss needs the last block and the output matrix"
            + (", which is the embedding" if getattr(profile, "tied", False) else ""),
        ],
        "pipelineStageSuggestions": _stages(case),
        "assumed": list(getattr(profile, "assumed", ())),
    }


def _layers(profile: ModelProfile) -> list[dict[str, Any]]:
    rows = (
        ("block (the largest kind)", profile.num_blocks, profile.num_block_parameters),
        ("embedding, final norm and output", 1, profile.num_root_parameters),
    )
    return [
        {"name": name, "count": count, "parametersEach": each}
        for name, count, each in rows
        if count
    ]


def _edges(plan: Plan) -> list[int]:
    """The first block of each stage, and the number of blocks."""
    return [0, *accumulate(plan.stage_blocks)]


def _stages(case: Case) -> list[dict[str, Any]]:
    layout, edges = case.plan.layout, _edges(case.plan)
    found: list[dict[str, Any]] = []
    for stage in range(layout.pipeline if layout.pipeline > 1 else 0):
        mine = stages_of_rank(layout, stage)
        ranges = ", ".join(
            f"{edges[part]}-{edges[part + 1] - 1}" for part in mine if edges[part] < edges[part + 1]
        )
        head_rank = 0 if is_v_shaped(layout) else layout.pipeline - 1
        holds = [
            name
            for name, here in (
                ("blocks", bool(ranges)),
                ("embedding", stage == 0),
                ("output matrix and loss", stage == head_rank),
            )
            if here
        ]
        found.append({"stage": stage, "blocks": ranges, "holds": ", ".join(holds)})
    return found


def _compute(case: Case) -> dict[str, float | str | None]:
    plan, view = case.plan, case.view
    peak = plan.cluster.peak_flops_per_s.get(plan.precision)
    tokens = view.num_tokens
    return {
        "FLOPs": None
        if tokens is None
        else training_flops(
            plan.profile.num_parameters, tokens, recompute=plan.layout.recompute in WHOLE_BLOCKS
        ),
        "tokens": None if tokens is None else format_count(tokens),
        "peakPerGPU": None if peak is None else format_flops_per_s(peak),
        "GPUHours": view.accelerator_hours if case.feasible else None,
    }


def _memory_of(case: Case) -> int:
    """What the cluster has; where nothing fits, the plan is that of a larger one."""
    asked = case.job.spec.cluster.memory
    if case.feasible:
        return case.plan.cluster.memory_bytes
    return asked if isinstance(asked, int) else case.available_bytes or 0


def available_of(case: Case) -> int:
    """Bytes a rank may use: what was free, or what the job declares."""
    return case.plan.cluster.usable_bytes if case.feasible else _memory_of(case)


def _rate(bytes_per_s: float | None) -> str:
    return "unknown" if bytes_per_s is None else f"{bytes_per_s * 8 / 1e9:.4g} Gb/s"
