"""A plan in the engineer's output schema, word for word, and its additions.

Additions, none of which the schema forbids: numbers beside every sentence (`...Bytes`,
`...Seconds`, `...Steps`), and what its list of strategies cannot express (sharding, context and
expert parallelism).
"""

from dataclasses import asdict
from typing import Any

from paceline.contracts.nulls import with_null_reasons
from paceline.contracts.operate import (
    applies_to,
    backend,
    backends,
    checkpoint_storage,
    health_checks,
    init_method,
    is_elastic,
    recovery,
)
from paceline.contracts.watched import alert_rows, watched
from paceline.job import Job, LayoutSpec
from paceline.job.evaluate_rules import kept_every, num_best
from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import rank_map
from paceline.plan.decision import Plan
from paceline.plan.outlook import Outlook
from paceline.units import counted, format_bytes, format_seconds

_SHARDING = {
    "none": "none: every data rank holds the whole of its part (DDP)",
    "zero1": "optimizer state over the data ranks (ZeRO-1)",
    "zero2": "optimizer state and gradients over the data ranks (ZeRO-2)",
    "full": "parameters, gradients and optimizer state over the data ranks (FSDP2, ZeRO-3)",
}

_PAGE = "http://127.0.0.1:7341"
"""Where `paceline watch` serves its page, if the port is free; it prints the page's token."""


def output_of(plan: Plan, job: Job, view: Outlook) -> dict[str, Any]:
    """The plan in the engineer's words."""
    return {
        "distributedConfig": _distributed(plan, job),
        "resourceAllocation": _resources(plan),
        "checkpointStrategy": _checkpoints(plan, job, view),
        "faultTolerance": _faults(plan, job, view),
        "monitoringSetup": _monitoring(plan, job),
    }


def strategy_of(layout: Layout, asked: LayoutSpec) -> str:
    """The nearest of the schema's words: its list has none for sharding, context or experts. A
    layout that splits the model one way is named by it where the job asks for that way.

    >>> strategy_of(Layout(data=8, sharding="full", micro_batch=1, accumulation=1), LayoutSpec())
    'data-parallelism'
    """
    split = [name for name in ("tensor", "pipeline") if getattr(layout, name) > 1]
    if not split:
        return "data-parallelism"
    is_alone = layout.data == layout.context == 1
    if len(split) == 1 and (is_alone or getattr(asked, split[0]) != "auto"):
        return f"{split[0]}-parallelism"
    return "hybrid-3d-parallelism"


def sharding_of(layout: Layout) -> str:
    """What the data ranks share, in words."""
    if layout.sharding == "hybrid":
        return (
            f"parameters, gradients and optimizer state over {layout.shard_degree} ranks, whole "
            "copies between the groups (HSDP)"
        )
    return _SHARDING[layout.sharding]


def degrees_of(layout: Layout) -> dict[str, int]:
    """Degree of every way of splitting."""
    axes = ("data", "tensor", "pipeline", "context", "expert")
    return {axis: getattr(layout, axis) for axis in axes} | {"shard": layout.shard_degree}


_PLACES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "ep": "expert",
    "shard": "shard",
    "replica": "replica",
}


def node_assignments(plan: Plan) -> list[dict[str, int]]:
    """Every rank's node, accelerator and place on each axis."""
    per_node = plan.cluster.ranks_per_node
    return [
        {"rank": place.rank, "node": place.rank // per_node, "gpu": place.rank % per_node}
        | {name: getattr(place, axis) for name, axis in _PLACES.items()}
        for place in rank_map(plan.layout)
    ]


def _distributed(plan: Plan, job: Job) -> dict[str, Any]:
    return {
        "strategy": strategy_of(plan.layout, job.spec.layout),
        "worldSize": plan.layout.num_ranks,
        "backend": backend(plan),
        "initMethod": init_method(plan, job),
        "backends": backends(plan),
        "strategyDetail": plan.layout_name,
        "degrees": degrees_of(plan.layout),
        "microBatchSize": plan.layout.micro_batch,
        "gradientAccumulationSteps": plan.layout.accumulation,
        "globalBatchSize": plan.layout.global_batch,
        "precision": plan.precision,
        "recompute": plan.layout.recompute,
        "offload": plan.layout.offload,
        "pipelineSchedule": plan.layout.schedule if plan.layout.pipeline > 1 else None,
    }


def _resources(plan: Plan) -> dict[str, Any]:
    memory, cluster = plan.estimate.memory, plan.cluster
    known = memory.known_bytes * cluster.ranks_per_node
    more = "" if memory.total_bytes is not None else " and what is unknown"
    return {
        "nodeAssignments": node_assignments(plan),
        "memoryPerNode": (
            f"{format_bytes(known)}{more}: {counted(cluster.ranks_per_node, 'rank')} x "
            f"{format_bytes(memory.known_bytes)} (estimated)"
        ),
        "shardingStrategy": sharding_of(plan.layout),
        "memoryPerNodeBytes": None if memory.total_bytes is None else known,
        "memoryPerRankBytes": memory.total_bytes,
        "memoryPerRankParts": dict(memory.parts),
        "usablePerRankBytes": plan.limit_bytes,
        "fullestRankOf": plan.layout_name,
    }


def _checkpoints(plan: Plan, job: Job, view: Outlook) -> dict[str, Any]:
    keep = job.spec.checkpoint
    every = plan.checkpoint_every
    seconds = None if view.step_s is None else every * view.step_s
    best = view.checkpoints
    best_steps = best and best.every_steps
    if keep.every == "auto":  # the plan has it, or none is better as goodput is printed
        best_steps = best and every
    retention = [f"newest {keep.keep_last}"]
    if (kept := kept_every(job.spec)) is not None:
        retention.append(f"every {kept} steps")
    if num_best(job.spec):
        retention.append(f"{num_best(job.spec)} with the lowest evaluation loss")
    return {
        "frequency": f"every {every} steps"
        + ("" if seconds is None else f", {format_seconds(seconds)} (estimated)"),
        "storage": f"{checkpoint_storage(plan, job)}: "
        f"{format_bytes(plan.estimate.num_checkpoint_bytes)} each",
        "retention": ", ".join(retention),
        "frequencySteps": every,
        "intervalSeconds": seconds,
        "checkpointBytes": plan.estimate.num_checkpoint_bytes,
        "standstillSeconds": view.save_s,
        "bestIntervalSteps": best_steps,
        "bestIntervalReason": None if best is None else best.reason,
    }


def _faults(plan: Plan, job: Job, view: Outlook) -> dict[str, Any]:
    good = view.goodput
    return {
        "elasticTraining": is_elastic(plan, job.spec),
        "recoveryStrategy": recovery(plan, job.spec),
        "healthChecks": [asdict(check) for check in health_checks(plan)],
        "expectedFailuresPerDay": good and 24 * good.failures_per_hour,
        "expectedUsefulShare": good and good.useful,
        "expectedRecoverySeconds": view.restart_s,
        "expectedLostSecondsPerFailure": good and good.lost_s_per_failure,
    }


def _monitoring(plan: Plan, job: Job) -> dict[str, Any]:
    seen = watched(plan, job)
    url, command = _PAGE, "paceline watch"
    if "tensorboard" in job.spec.metrics.wanted:
        url, command = "http://localhost:6006", "tensorboard --logdir runs"
    found = {
        "appliesTo": applies_to(plan, job),
        "metrics": seen.metrics and list(seen.metrics),
        "alerts": alert_rows(seen.rules, "metric", "steps"),
        "dashboardUrl": None if seen.rules is None else url,
        "dashboardCommand": None if seen.rules is None else command,
    }
    return with_null_reasons(found, dict.fromkeys(found, seen.why_none))
