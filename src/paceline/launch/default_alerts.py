"""The built-in alert rules of a run, which `control/alerts.py` judges while it runs."""

from collections.abc import Iterator

from paceline.job.alerts import AlertSpec, ConditionSpec
from paceline.plan import Plan

_LEAST_SILENCE_S = 300.0
_SILENT_STEPS = 10
"""No evaluation, save or recovery should take longer. A guess."""

_NO_GRADIENT, _NO_GRADIENT_STEPS = 1e-30, 3
"""Below what any gradient of use has; an exact 0 is what a detached loss gives."""

_LOW_SCALE = 1.0
"""DeepSpeed's `min_loss_scale` (docs, fp16 options): below it the loss is made smaller, and fp16
gains nothing."""

_SLOW = 0.8
"""Share of the planned rate below which somebody should look, where the plan has no range."""

_SLOW_STEPS = 20
_FULL = 0.95
_HOT_C = 85.0
_HOT_S = 60.0
"""Data sheets have limits of 87 to 95 degrees, at which clocks are lowered. A guess."""

_IDLE, _IDLE_S = 0.2, 300.0
_SPINS, _SPINS_S = 0.35, 120.0
"""A collective that waits keeps a GPU at 100 % utilization and low power: 70 W of 300 in
NVIDIA/nccl#968. The share is a guess."""

_OLD_CHECKPOINTS = 3
_LEAST_AGE_S = 1800.0
_ROOM_FOR = 2
"""Intervals without a checkpoint, and checkpoints for which there should be room. Guesses."""


def alerts(plan: Plan | None) -> tuple[AlertSpec, ...]:
    """The built-in rules, with thresholds from the plan's own estimate."""
    if plan is None:
        return (*_of_every_run(_LEAST_SILENCE_S), *_of_gpus())
    found = [*_of_every_run(silence_s(plan)), *_of_plan(plan)]
    return (*found, *_of_gpus()) if plan.cluster.backend == "nccl" else tuple(found)


def silence_s(plan: Plan) -> float:
    """Seconds without a step, a save or an evaluation after which a run makes no progress."""
    return max(_LEAST_SILENCE_S, _SILENT_STEPS * (plan.estimate.step_s or 0.0))


def _of_every_run(limit_s: float) -> Iterator[AlertSpec]:
    yield AlertSpec(
        name="no-progress",
        metric="run/silence_s",
        above=limit_s,
        severity="critical",
        action="a rank hangs or died: `paceline status RUN` has the state, `paceline logs RUN` "
        "every rank's output",
    )
    yield AlertSpec(
        name="loss-not-finite",
        metric="train/loss",
        not_finite=True,
        severity="critical",
        action="look at train/grad_norm before it; lower the learning rate or lengthen the warm-up",
    )
    yield AlertSpec(
        name="no-gradient",
        metric="train/grad_norm",
        below=_NO_GRADIENT,
        steps=_NO_GRADIENT_STEPS,
        severity="critical",
        action="nothing is learned: look for a loss that is detached from the model, for frozen "
        "weights, or for fp16 gradients that became 0 (train.precision: bf16)",
    )
    yield AlertSpec(
        name="loss-scale-low",
        metric="train/loss_scale",
        below=_LOW_SCALE,
        action="gradients overflow in fp16 again and again: lower the learning rate, or "
        "train.precision: bf16",
    )
    yield AlertSpec(
        name="straggler",
        event="StragglerNamed",
        action="look at the clock, heat and network of that rank's machine",
    )
    yield AlertSpec(
        name="restarted",
        metric="run/restarts",
        above=0,
        severity="info",
        to=[],
        action="events.jsonl has the cause",
    )


def _of_plan(plan: Plan) -> Iterator[AlertSpec]:
    estimate = plan.estimate
    yield AlertSpec(
        name="memory-full",
        metric="memory/peak_bytes",
        above=_FULL * plan.cluster.memory_bytes,
        action="halve layout.micro_batch: accumulation doubles, the batch stays",
    )
    # A CPU's rate depends on what else runs there: a rule would cry wolf.
    if estimate.tokens_per_s is not None and plan.cluster.backend != "gloo":
        yield AlertSpec(
            name="slow",
            metric="speed/tokens_per_s",
            below=_least_rate(plan) * estimate.tokens_per_s,
            steps=_SLOW_STEPS,
            action="compare data_s, forward_s and vote_s with the first steps: a growing vote_s is "
            "one slow rank, a growing data_s is the data (forward_s where your program reads it)",
        )
    if estimate.step_s is not None:
        interval_s = plan.checkpoint_every * estimate.step_s
        yield AlertSpec(
            name="checkpoint-old",
            metric="run/checkpoint_age_s",
            above=max(_LEAST_AGE_S, _OLD_CHECKPOINTS * interval_s),
            action="events.jsonl says why none was saved; a failure now repeats all since then",
        )
    if estimate.num_checkpoint_bytes:
        yield AlertSpec(
            name="disk-full",
            metric="host/disk_free_bytes",
            below=float(_ROOM_FOR * estimate.num_checkpoint_bytes),
            severity="critical",
            action="make room where the run's folder is, or lower checkpoint.keep_last",
        )
    budget = next((limit.limit for limit in plan.limits if limit.name == "budget"), None)
    if budget is not None:
        yield AlertSpec(
            name="over-budget",
            metric="run/usd",
            above=budget,
            severity="critical",
            action="plan.budget is spent: stop the run, or raise it",
        )


def _least_rate(plan: Plan) -> float:
    """Share of the planned rate below which a step is outside the plan's range."""
    typical_s, slow_s = plan.estimate.step_s, plan.estimate.step_high_s
    return min(_SLOW, typical_s / slow_s) if typical_s and slow_s else _SLOW


def _of_gpus() -> Iterator[AlertSpec]:
    yield AlertSpec(
        name="gpu-hot",
        metric="gpu/temperature_c",
        above=_HOT_C,
        lasting=_HOT_S,
        action="look at the fans and the air of that machine: clocks are lowered next",
    )
    yield AlertSpec(
        name="gpu-idle",
        metric="gpu/utilization",
        below=_IDLE,
        lasting=_IDLE_S,
        severity="info",
        action="compare data_s with the step: it waits for the data, or for other ranks",
    )
    yield AlertSpec(
        name="gpu-spins",
        metric="gpu/power_share",
        below=_SPINS,
        lasting=_SPINS_S,
        when=ConditionSpec(metric="gpu/utilization", above=0.95),
        severity="critical",
        action="busy without work: a collective waits for another rank; see which one is stuck",
    )
