"""Steps between checkpoints: what was left open, and what the interval that the job fixes costs."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.estimate.goodput import Goodput
from paceline.job import Job
from paceline.plan.decision import Caution, Plan
from paceline.plan.outlook import Outlook
from paceline.units import counted, format_seconds

_LEAST_GAINED = 0.01
"""Share of the time that a longer interval than a tenth of the steps has to gain. A choice: what a
crash loses is bounded otherwise."""

_MOST_LOST_FIXED = 0.05
"""Share that an interval of the job's own may lose without a warning. A choice."""


def with_advised(plan: Plan, job: Job, view: Outlook) -> Plan:
    """The plan with Daly's interval, where the job leaves it open and the goodput differs as it is
    printed. On this machine nobody has counted failures."""
    advice, good = view.checkpoints, view.from_checkpoints
    if job.spec.checkpoint.every != "auto" or plan.cluster.is_local:
        return plan
    if advice is None or good is None or not advice.every_steps:
        return plan
    ours, best = f"{good.useful:.2%}", f"{advice.goodput.useful:.2%}"
    every, gain = advice.every_steps, advice.goodput.useful - good.useful
    if gain <= (0 if every < plan.checkpoint_every else _LEAST_GAINED) or ours == best:
        return plan
    reason = (
        f"goodput {best}{_if_alone(view)}; {ours} if saved every {plan.checkpoint_every}; assumed: "
        f"{advice.reason} ({_storage(view)})"
    )
    return _every(plan, every, reason)


def with_spot(plan: Plan, job: Job, good: Goodput) -> Plan:
    """The plan with the interval that its spot machines are priced with, where it is left open."""
    step_s = plan.estimate.step_s
    if job.spec.checkpoint.every != "auto" or not step_s:
        return plan
    every = max(1, min(job.spec.train.steps, round(good.interval_s / step_s)))
    reason = (
        f"the best where a machine fails or a spot instance is taken every "
        f"{format_seconds(good.mtbf_s)}: goodput {good.useful:.2%}"
    )
    return _every(plan, every, reason)


def _every(plan: Plan, every: int, reason: str) -> Plan:
    """The plan with another interval, and why."""
    changed = {"value": counted(every, "step"), "reason": reason}
    return replace(
        plan,
        checkpoint_every=every,
        decisions=tuple(
            replace(each, **changed) if each.field == "checkpoint.every" else each
            for each in plan.decisions
        ),
    )


def interval_caution(plan: Plan, job: Job, view: Outlook) -> Iterator[Caution]:
    """An interval of the job's own that loses more than 5 % of the time against the advised one."""
    advice, good, best = view.checkpoints, view.goodput, view.best_goodput
    every = job.spec.checkpoint.every
    if every == "auto" or advice is None or good is None or best is None:
        return
    # On this machine nobody has counted failures.
    if plan.cluster.is_local or best.useful - good.useful <= _MOST_LOST_FIXED:
        return
    assert view.train_s is not None, "there is advice"
    saved = "and the run ends"
    if view.wall_s is not None:
        saved = f"{format_seconds(view.wall_s - view.train_s / best.useful)} less in all"
    yield Caution(
        about="checkpoint",
        what=f"checkpoint.every is {counted(every, 'step')}, {format_seconds(good.interval_s)}, "
        f"and failures are {format_seconds(good.mtbf_s)} apart: the goodput is "
        f"{good.useful:.1%}",
        fix=f"set checkpoint.every to {advice.every_steps}, or leave it out: "
        f"{best.useful:.1%}, {saved} (assumed: {_storage(view)})",
    )


def _if_alone(view: Outlook) -> str:
    """The interval is for the day on which no copy of the state is left."""
    from_copies = view.state is not None and view.state.chosen != "checkpoint"
    return ", if every failure resumed from a checkpoint" if from_copies else ""


def _storage(view: Outlook) -> str:
    return f"{view.assumptions.storage_bytes_per_s / 1e9:g} GB/s from a node to storage"
