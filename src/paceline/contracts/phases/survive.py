"""Phases 8 and 9: what happens when something fails, and how it is seen."""

from typing import Any

from paceline.contracts.nulls import with_null_reasons
from paceline.contracts.operate import checkpoint_storage, health_checks, recovery
from paceline.contracts.phases.case import Case
from paceline.contracts.watched import alert_rows
from paceline.job import JobSpec, RecoverySpec
from paceline.job.evaluate_rules import kept_every, num_best
from paceline.launch.default_alerts import silence_s
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.plan.lost_node import after_a_lost_node, fewest_ranks
from paceline.render.mlx import runs_mlx
from paceline.units import format_bytes, format_count, format_seconds


def survive_faults(case: Case) -> dict[str, Any]:
    """Checkpoints and restarts, with what failures are expected to cost."""
    plan, view, spec = case.plan, case.view, case.job.spec
    good, best = view.goodput, view.checkpoints
    every = plan.checkpoint_every
    period = "" if view.step_s is None else f", {format_seconds(every * view.step_s)}"
    found = {
        "appliesTo": case.applies_to,
        "strategy": f"checkpoints; on a failure {recovery(plan, spec)}",
        "checkpointFrequency": f"every {every} steps{period}",
        "checkpointFrequencySteps": every,
        "advisedFrequencySteps": None if best is None else best.every_steps,
        "storageLocation": {
            "primary": checkpoint_storage(plan, case.job),
            "backup": spec.checkpoint.copy_to or "none: checkpoint.copy_to copies them elsewhere",
            "type": "shared file system"
            if plan.cluster.num_nodes > 1 and not runs_mlx(plan)
            else "local disk",
        },
        "components": [
            "parameters",
            "optimizer state",
            "buffers",
            "step, from which samples and learning rate follow",
        ],
        "format": "torch.distributed.checkpoint, "
        f"{format_bytes(plan.estimate.num_checkpoint_bytes)}, with hashes and a COMMIT mark",
        "rotation": {
            "keepLatest": spec.checkpoint.keep_last,
            "keepBest": num_best(spec),
            "period": kept_every(spec),
        },
        "recoveryPlan": {
            "automatic": not runs_mlx(plan),
            "maxAttempts": 0 if runs_mlx(plan) else spec.recovery.max_restarts,
            "fallback": "a checkpoint that fails its hash is refused and the one before it taken",
        },
        "elastic": _elastic(plan, spec),
        "failureDetection": _detection(plan, spec.recovery),
        "gracefulDegradation": [
            "a full disk costs that checkpoint, not the run",
            "a loss that is not finite refuses the step on all ranks",
            f"SIGTERM saves at the next step boundary, within {spec.recovery.grace:g} s",
        ],
        "estimatedRecoveryTime": f"{format_seconds(view.restart_s)}: restart assumed "
        f"{format_seconds(view.assumptions.restart_s)}, reading {format_seconds(view.write_s)}",
        "estimatedRecoverySeconds": view.restart_s,
        "expectedFailuresPerDay": None if good is None else 24 * good.failures_per_hour,
        "expectedUsefulShare": None if good is None else good.useful,
        "reason": None if best is None else best.reason,
    }
    no_time = "the step's time is unknown"
    reasons = {
        "rotation.period": "no checkpoint is kept for good: neither checkpoint.keep_every nor "
        "evaluate.outputs_every is set",
        **dict.fromkeys(("advisedFrequencySteps", "reason"), no_time),
        **dict.fromkeys(("expectedFailuresPerDay", "expectedUsefulShare"), no_time),
    }
    return with_null_reasons(found, reasons)


def _elastic(plan: Plan, spec: JobSpec) -> dict[str, int | str]:
    ranks = plan.cluster.num_ranks
    if plan.engine != "paceline":
        fixed = f"the number of {plan.engine}'s ranks stays the same"
        return {"min": ranks, "max": ranks, "up": fixed, "down": fixed}
    if not spec.recovery.shrink:
        up, down = "the run never has fewer ranks", "the run waits, and ends"
        off = "recovery.shrink is off: "
        return {"min": ranks, "max": ranks, "up": off + up, "down": off + down}
    priced = case_of_plan(plan)
    return {
        "min": fewest_ranks(spec, plan.layout, priced),
        "max": ranks,
        "up": "the run grows back to all ranks when the node returns",
        "down": after_a_lost_node(spec, plan.layout, plan.cluster, priced, plan.limit_bytes),
    }


def _detection(plan: Plan, recover: RecoverySpec) -> dict[str, str]:
    if plan.engine != "paceline":
        return {
            "interval": "at once for a process that ends",
            "timeout": f"{format_seconds(silence_s(plan))} without a finished step: an alert",
            "mechanism": "the launcher sees a process end; alerts judge the age of the last step",
        }
    return {
        "interval": "at once for a process that ends; a node is lost when it is silent for "
        f"{format_seconds(recover.heartbeat)}",
        "timeout": f"at least {format_seconds(recover.patience)} for a worker that stands still; "
        f"{format_seconds(recover.collective_timeout)} for one operation between accelerators",
        "mechanism": "an agent on each node watches its processes and the steps that they report",
    }


_FILES = "one JSON object a line (metrics.jsonl, events.jsonl), text by rank in logs/"


def plan_monitoring(case: Case) -> dict[str, Any]:
    """What is recorded, what raises an alarm, and what the run is compared with."""
    plan, seen = case.plan, case.seen
    price, train = plan.estimate, case.job.spec.train
    is_ours, is_judged = seen.shows("data_s"), seen.rules is not None
    on_gpu = plan.cluster.backend == "nccl" and is_judged
    boards = [name for name in ("tensorboard",) if name in case.job.spec.metrics.wanted]

    def known(*texts: str) -> list[str]:
        return [text for text in texts if seen.shows(text)]

    found = {
        "appliesTo": case.applies_to,
        "metrics": seen.metrics and list(seen.metrics),
        "alertingRules": alert_rows(seen.rules),
        "gpuMetrics": ["utilization.gpu", "temperature.gpu", "power.draw", "ecc.errors"]
        if on_gpu
        else [],
        "cpuMetrics": known("data_s (waiting for samples)", "forward_s"),
        "memoryMetrics": known("memory_bytes"),
        "networkMetrics": known(
            "backward_s (reduction included)", "vote_s (waiting for the slowest)"
        ),
        "diskMetrics": ["seconds of each save, in events.jsonl"] if is_ours else [],
        "healthChecks": [
            {name: getattr(check, name) for name in ("name", "command", "expect", "when")}
            for check in health_checks(plan)
        ],
        "profiling": {
            "tools": "torch.profiler; nsys where CUDA is",
            "frequency": f"steps 10 to 12 of {train.steps}, once a change",
        },
        "logging": {
            "level": "INFO",
            "format": _FILES if is_judged else "the program's own, on standard output",
            "aggregation": "rank 0 writes the metrics" if is_ours else "rank 0 prints the steps",
            "retention": "as long as the run's folder"
            if is_judged
            else "as long as you keep the output",
        },
        "dashboards": ["paceline watch", *(f"{each} --logdir runs" for each in boards)]
        if is_judged
        else [],
        "baselines": {
            "step_s": price.step_s,
            "tokens_per_s": price.tokens_per_s,
            "mfu": getattr(price, "mfu", None),
            "memory_bytes": price.memory.total_bytes,
        },
        "bottleneckDetection": [
            {"symptom": symptom, "diagnosis": diagnosis}
            for symptom, diagnosis in _symptoms(price.tokens_per_s)
            if seen.shows(symptom)
        ],
    }
    return with_null_reasons(found, dict.fromkeys(("metrics", "alertingRules"), seen.why_none))


def _symptoms(rate: float | None) -> tuple[tuple[str, str], ...]:
    slow = "" if rate is None else f" below {format_count(0.8 * rate)}"
    return (
        (
            f"tokens_per_s{slow}, data_s grows",
            "the data or the host: compare with a run on samples in memory",
        ),
        (
            "vote_s grows, forward_s does not",
            "one slow rank: its clock, its temperature, its network",
        ),
        (
            "backward_s grows with the ranks",
            "exposed reduction: phase 5's buckets, or a larger batch",
        ),
        (
            "grad_norm jumps, then the loss is null",
            "learning rate too high or a bad sample: samples_digest names the step's",
        ),
    )
