"""Steps between checkpoints: what was left open, and what the interval that the job fixes costs."""

from collections.abc import Iterator
from dataclasses import replace

from paceline.job import Job
from paceline.plan.decision import Caution, Decision, Plan
from paceline.plan.outlook import Outlook
from paceline.units import counted, format_seconds

_MOST_LOST_OPEN = 0.01
"""Share of the time that a tenth of the steps may lose against the advised interval before that is
taken. A choice: below it the assumed failure rate and storage decide more."""

_MOST_LOST_FIXED = 0.05
"""Share that an interval of the job's own may lose without a warning. A choice."""


def shortened(plan: Plan, job: Job, view: Outlook) -> Plan:
    """The plan with the advised interval, where the job leaves it open and a tenth of the steps
    loses more than 1 % of the time against it."""
    advice = view.checkpoints
    if job.spec.checkpoint.every != "auto" or advice is None or view.goodput is None:
        return plan
    if not advice.every_steps or _lost(plan, view) <= _MOST_LOST_OPEN:
        return plan
    decision = Decision(
        field="checkpoint.every",
        value=counted(advice.every_steps, "step"),
        reason=f"a tenth of the steps, {plan.checkpoint_every}, would give a "
        f"goodput of {view.goodput.useful:.1%}: {advice.reason} ({_guess(view)})",
    )
    return replace(
        plan,
        checkpoint_every=advice.every_steps,
        decisions=tuple(
            decision if each.field == decision.field else each for each in plan.decisions
        ),
    )


def with_advice(decisions: tuple[Decision, ...], view: Outlook) -> tuple[Decision, ...]:
    """The decisions; that of the interval with Daly's, where it is not taken, the run is long
    enough that failures count, and the goodput differs as it is printed."""
    advice, good = view.checkpoints, view.goodput
    if advice is None or good is None or not advice.every_steps:
        return decisions
    ours, best = f"{good.useful:.2%}", f"{advice.goodput.useful:.2%}"
    if ours == best or view.train_s is None or view.train_s <= advice.interval_s:
        return decisions
    text = (
        f"; every {advice.every_steps} would give a goodput of {best}, not {ours} ({_guess(view)})"
    )
    return tuple(
        replace(each, reason=each.reason + text) if each.field == "checkpoint.every" else each
        for each in decisions
    )


def interval_caution(plan: Plan, job: Job, view: Outlook) -> Iterator[Caution]:
    """An interval of the job's own that loses more than 5 % of the time against the advised one."""
    advice, good = view.checkpoints, view.goodput
    every = job.spec.checkpoint.every
    if every == "auto" or advice is None or good is None or not advice.every_steps:
        return
    if _lost(plan, view) <= _MOST_LOST_FIXED:
        return
    assert view.train_s is not None, "there is advice"
    saved = "and the run ends"
    if view.wall_s is not None:
        saved = f"{format_seconds(view.wall_s - view.train_s / advice.goodput.useful)} less in all"
    yield Caution(
        about="checkpoint",
        what=f"checkpoint.every is {counted(every, 'step')}, {format_seconds(good.interval_s)}, "
        f"and failures are {format_seconds(good.mtbf_s)} apart: the goodput is "
        f"{good.useful:.1%}",
        fix=f"set checkpoint.every to {advice.every_steps}, or leave it out: "
        f"{advice.goodput.useful:.1%}, {saved} (estimated; {_guess(view)})",
    )


def _lost(plan: Plan, view: Outlook) -> float:
    """Share of the time that the plan's interval loses against the advised one; 0 on this machine,
    whose failures nobody has counted."""
    if plan.cluster.is_local or view.checkpoints is None or view.goodput is None:
        return 0.0
    return view.checkpoints.goodput.useful - view.goodput.useful


def _guess(view: Outlook) -> str:
    return f"guess: {view.assumptions.storage_bytes_per_s / 1e9:g} GB/s a node to storage"
