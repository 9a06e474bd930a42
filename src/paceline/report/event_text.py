"""One line of plain text for each event that a person wants to see."""

import math
from collections.abc import Sequence

from paceline.record import events as log
from paceline.record.checkpoints import checkpoint_name
from paceline.record.repair_text import corruption_text, recovery_text
from paceline.report.alert_text import describe_alert
from paceline.units import counted, format_seconds


def describe(event: log.AnyEvent) -> str | None:
    """One line for a person, or None for what only the record wants."""
    match event:
        case log.TrainingStarted():
            origin = f"from {event.checkpoint or _ORIGINS.get(event.source, event.source)}"
            return (
                f"{event.world_size} rank{'s' if event.world_size > 1 else ''} met over "
                f"{event.backend}; "
                f"training from step {event.first_step}, {origin}"
            )
        case log.CheckpointRefused():
            return f"checkpoint {event.checkpoint} refused: {event.reason}"
        case log.CheckpointFailed():
            return (
                f"checkpoint of step {event.step} not written: {event.reason}; training continues"
            )
        case log.CheckpointCopyFailed():
            return f"checkpoint of step {event.step} not copied, training continues: {event.reason}"
        case log.Evaluated():
            parts = ", ".join(f"{name} {loss_text(loss)}" for name, loss in event.by_source.items())
            text = f"eval loss after step {event.step}: {loss_text(event.loss)}"
            if event.accuracy is not None:
                text += f", accuracy {event.accuracy:.1%}"
            return f"{text} ({parts})" if parts else text
        case log.StoppedEarly():
            return f"stopping early after step {event.step}: {early_text(event)}"
        case log.BaselineEvaluated():
            return f"eval loss of a {event.name} (baseline): {loss_text(event.loss)}"
        case log.Noted():
            return f"note: {event.text}"
        case log.StepRefused():
            return f"step {event.step} refused by all ranks: {event.reason}"
        case log.FaultInjected():
            who = f" at rank {event.rank}" if event.rank >= 0 else " at a spare"
            if event.fault.startswith(f"rank={event.rank}@"):
                who = ""
            return f"drill: {event.fault}{who} (pid {event.pid})"
        case log.WorkerStuck():
            return (
                f"rank {event.rank} is stuck ({event.kind}): in {event.phase} of step "
                f"{event.step} for {format_seconds(event.waited_s)}"
            )
        case log.StragglerNamed():
            does = "; a spare takes its rank" if event.evicted else ""
            return f"rank {event.rank} is {event.factor:.2f} times as slow as its peers{does}"
        case log.LossOutlierNamed():
            return (
                f"rank {event.rank} has {event.factor:.2f} times the loss of its peers over "
                f"{event.num_steps} steps: it reads other data, or computes with other weights"
            )
        case log.CorruptionFound():
            return corruption_text(event)
        case log.WorkerLost():
            return (
                f"rank {event.rank} lost ({event.cause}): {event.how}; "
                f"it had finished step {event.last_step}"
            )
        case log.WorldChanged():
            ranks = f"{event.num_ranks} rank{'s' if event.num_ranks > 1 else ''}"
            return f"continues with {ranks} ({event.layout}): {event.reason}"
        case log.BatchChanged():
            rates = f"{event.rate_factor:.4g} times the schedule's ({event.rule} rule)"
            if event.rate_factor == 1:
                rates = "the schedule's again"
            return (
                f"from step {event.step} on the global batch is {event.global_batch} (was "
                f"{event.before}), and learning rates are {rates}"
            )
        case log.PlanChanged():
            return (
                f"resumes with {', '.join(event.settings)} ({event.layout}, micro-batch "
                f"{event.micro_batch} x accumulation {event.accumulation}), the same global batch "
                f"{event.global_batch}: {event.reason}"
            )
        case log.ExactnessChanged():
            promise = "equal to rounding, no longer to the bit"
            if event.exactness == "different":
                promise = "another training than the undisturbed one"
            return f"from here on {promise}: {event.reason}"
        case log.NodeSetAside():
            goes = "what it loses goes to other nodes"
            if event.is_only:
                goes = "the run has no other, and its ranks stay there; look at its hardware"
            return (
                f"node {event.node} failed {event.strikes} times within "
                f"{format_seconds(event.window_s)}: {goes}"
            )
        case log.GpuHealth():
            sign = "; a strike against its node" if event.is_fatal else ""
            return f"node {event.node}, GPU {event.gpu}: {event.what} {event.value}{sign}"
        case log.BatchSkipped():
            ids = ", ".join(map(str, event.samples))
            return f"step {event.step} is skipped by all ranks: poison batch, sample ids {ids}"
        case log.Recovered():
            return _describe_recovery(event)
        case log.ControllerReplaced():
            return (
                f"the controller was killed; another one took over after "
                f"{format_seconds(event.away_s)}, and training continued"
            )
        case log.StopAsked():
            return f"{event.by}: stopping at the next step boundary; again to stop at once"
        case _:
            return describe_alert(event)


def exactness_text(exactness: str, events: Sequence[log.AnyEvent]) -> str:
    """What is promised of a run's state, and why it is not more.

    >>> exactness_text("numeric", [])
    'numeric: train.deterministic is off; equal to an undisturbed run to rounding'
    """
    if exactness == "bitwise":
        return "bitwise: the same bits as an undisturbed run"
    if exactness not in ("numeric", "different"):
        return exactness
    reasons = [each.reason for each in events if isinstance(each, log.ExactnessChanged)]
    why = "; ".join(dict.fromkeys(reasons)) or "train.deterministic is off"
    equal = "equal to an undisturbed run to rounding"
    if exactness == "different":
        equal = "every sample once an epoch, but not the training of an undisturbed run"
    return f"{exactness}: {why}; {equal}"


def early_text(event: log.StoppedEarly) -> str:
    """Why training stopped before its last step, and where the best checkpoint is."""
    waited = counted(event.waited, "evaluation")
    text = f"no improvement in {waited}; lowest {loss_text(event.best_loss)} after step "
    kept = f" ({checkpoint_name(event.best_step)})" if event.best_step else ", before training"
    return f"{text}{event.best_step}{kept}"


def _describe_recovery(event: log.Recovered) -> str:
    parts = [
        ("fence", event.fence_s),
        ("meet", event.start_s),
        ("state", event.restore_s),
        ("first step", event.first_step_s),
    ]
    if event.detect_s is not None:
        parts.insert(0, ("detect", event.detect_s))
    shown = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts)
    return f"recovered in {format_seconds(event.downtime_s)} ({shown}); {recovery_text(event)}"


_ORIGINS = {
    "own": "the ranks' own state",
    "replica": "the ranks' own state",
    "memory": "the newest step in memory",
    "checkpoint": "a checkpoint",
    "initial": "the initial state",
}


def loss_text(loss: float | None) -> str:
    """Four digits; None too is a loss that is not finite: JSON has no other word for one."""
    return "not finite" if loss is None or not math.isfinite(loss) else f"{loss:.4f}"
