"""The built-in alert rules of a run, which `control/alerts.py` judges while it runs.

The rules are `catalog/default_alerts.toml`; here are the thresholds that follow from a plan.
"""

from typing import Any

from paceline.catalog.load import read_shipped
from paceline.job.alerts import AlertSpec
from paceline.plan import Plan
from paceline.plan.refit import leaner_settings

_LEAST_SILENCE_S = 300.0
_SILENT_STEPS = 10
"""No evaluation, save or recovery should take longer. A guess."""

_SLOW = 0.8
"""Share of the planned rate below which somebody should look, where the plan has no range."""

_FULL = 0.95

_OLD_CHECKPOINTS = 3
_LEAST_AGE_S = 1800.0
_ROOM_FOR = 2
"""Intervals without a checkpoint, and checkpoints for which there should be room. Guesses."""


def alerts(plan: Plan | None) -> tuple[AlertSpec, ...]:
    """The built-in rules, with thresholds from the plan's own estimate."""
    limits = {"no-progress": {"above": silence_s(plan)}} | _limits_of(plan)
    has_gpus = plan is None or plan.cluster.backend == "nccl"
    found = []
    for name, row in read_shipped("default_alerts.toml").items():
        of = row["of"]
        if of == "run" or (of == "gpu" and has_gpus) or (of == "plan" and name in limits):
            rule = {key: value for key, value in row.items() if key != "of"}
            found.append(AlertSpec(name=name, **rule | limits.get(name, {})))
    return tuple(found)


def silence_s(plan: Plan | None) -> float:
    """Seconds without a step, a save or an evaluation after which a run makes no progress."""
    step_s = plan.estimate.step_s if plan is not None else None
    return max(_LEAST_SILENCE_S, _SILENT_STEPS * (step_s or 0.0))


def _limits_of(plan: Plan | None) -> dict[str, dict[str, Any]]:
    """Rule -> its threshold, of the rules whose numbers this plan has; and what else follows from
    the plan."""
    if plan is None:
        return {}
    estimate = plan.estimate
    limits: dict[str, dict[str, Any]] = {
        "memory-full": {"above": _FULL * plan.cluster.memory_bytes, "action": _leaner(plan)}
    }
    # A CPU's rate depends on what else runs there: a rule would cry wolf.
    if estimate.tokens_per_s is not None and plan.cluster.backend != "gloo":
        limits["slow"] = {"below": _least_rate(plan) * estimate.tokens_per_s}
    if estimate.step_s is not None:
        interval_s = plan.checkpoint_every * estimate.step_s
        limits["checkpoint-old"] = {"above": max(_LEAST_AGE_S, _OLD_CHECKPOINTS * interval_s)}
    if estimate.num_checkpoint_bytes:
        limits["disk-full"] = {"below": float(_ROOM_FOR * estimate.num_checkpoint_bytes)}
    for limit in plan.limits:
        if limit.name == "budget":
            limits["over-budget"] = {"above": limit.limit}
    return limits


def _leaner(plan: Plan) -> str:
    settings = leaner_settings(plan.layout)
    if settings is None:
        return "more ranks have smaller shares: cluster.nodes"
    return f"the same batch in less memory: {settings}"


def _least_rate(plan: Plan) -> float:
    """Share of the planned rate below which a step is outside the plan's range."""
    typical_s, slow_s = plan.estimate.step_s, plan.estimate.step_high_s
    return min(_SLOW, typical_s / slow_s) if typical_s and slow_s else _SLOW
