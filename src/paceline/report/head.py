"""The top of a run's page: the outcome, one sentence, the tiles, what identifies the run."""

import math
import time
from dataclasses import dataclass

import numpy as np

from paceline.record import events as log
from paceline.record.metrics import most_bytes
from paceline.record.pace import PACE_STEPS, cost_of, pace_s
from paceline.report.sections import comparable_bytes, format_share
from paceline.report.timeline import Failure, Part, outcome
from paceline.report.view import RunView
from paceline.units import counted, format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number at the top of the page."""

    name: str
    value: str
    note: str
    how: str
    """`measured` or `estimated`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a reader should know after ten seconds."""

    outcome: str
    sentence: str
    reason: str
    resume: str
    """The command that resumes the run, where that makes sense."""

    tiles: list[Tile]
    facts: list[tuple[str, str]]


def head_of(view: RunView) -> Head:
    """The head of a run's page as it stands."""
    how, parts, broken = outcome(view), view.parts(), view.failures()
    ends = [e for e in view.events if isinstance(e, log.RunFinished)]
    end = ends[-1] if ends and how in ("finished", "interrupted", "failed") else None
    tiles = (
        _step_tile(view, how),
        _loss_tile(view),
        _rate_tile(view),
        _mfu_tile(view),
        _memory_tile(view),
        _wall_tile(view, parts),
        _failure_tile(broken, how),
        _cost_tile(view, how),
    )
    return Head(
        outcome=how,
        sentence=_sentence(view, how, parts, broken),
        reason=end.reason or "" if end is not None else "",
        resume=(
            f"paceline run --resume {view.folder}"
            if how in ("interrupted", "failed", "crashed")
            else ""
        ),
        tiles=[tile for tile in tiles if tile is not None],
        facts=_facts(view, end),
    )


def _sentence(view: RunView, how: str, parts: tuple[Part, ...], broken: list[Failure]) -> str:
    """The run in one sentence."""
    step = int(view.series.newest("step") or 0)
    of = "" if view.num_steps is None else f" of {view.num_steps:,}"
    started = [e for e in view.events if isinstance(e, log.RunStarted)]
    ranks = counted(started[-1].num_ranks, "rank") if started else "no rank yet"
    seconds = sum(part.end - part.start for part in parts)
    wall = format_seconds(seconds) if seconds > 0 else "no time"
    done = "Finished" if view.num_steps is None else f"Finished all {step:,} steps"
    text = {
        "finished": f"{done} on {ranks} in {wall}",
        "interrupted": f"Stopped after step {step:,}{of}, {wall} in",
        "failed": f"Failed after step {step:,}{of}, {wall} in",
        "running": f"Running on {ranks}: step {step:,}{of}, {wall} so far",
        "crashed": f"Its controller ended without a record of why, after step {step:,}{of}",
        "new": "Not started yet" + ("" if not of else f": {view.num_steps:,} steps to do"),
    }.get(how, how)
    early = _early_end(view)
    if how == "finished" and early is not None:
        best = _loss(early.best_loss)
        text = (
            f"Stopped early after step {early.step:,}{of} on {ranks}, {wall} in: no "
            f"improvement in {counted(early.waited, 'evaluation')}, lowest evaluation loss "
            f"{best} after step {early.best_step:,}"
        )
    recovered = sum(failure.recovered is not None for failure in broken)
    if recovered:
        times = {1: "once", 2: "twice"}.get(recovered, f"{recovered} times")
        text += f"; recovered by itself {times}"
    return text + "."


def _early_end(view: RunView) -> log.StoppedEarly | None:
    """How the newest part of the run ended before its last step; None where it did not."""
    kinds = log.StoppedEarly | log.TrainingStarted
    newest = [event for event in view.events if isinstance(event, kinds)][-1:]
    return next((event for event in newest if isinstance(event, log.StoppedEarly)), None)


def _step_tile(view: RunView, how: str) -> Tile | None:
    if how not in ("running", "crashed"):
        return None
    step = view.series.newest("step")
    left = left_s(view)
    return Tile(
        name="Step",
        value=f"{int(step or 0):,}" + (f" of {view.num_steps:,}" if view.num_steps else ""),
        note="time left unknown" if left is None else f"about {format_seconds(left)} left",
        how="measured",
    )


def left_s(view: RunView) -> float | None:
    """Seconds until the last step at the pace of the newest steps, saves and evaluations included;
    None before there are two, and where nobody knows how many there will be."""
    last = slice(-PACE_STEPS, None)
    at, generation = view.series.column("at")[last], view.series.column("generation")[last]
    pace = pace_s(at.tolist(), generation.tolist())
    if view.num_steps is None or pace is None:
        return None
    return pace * max(0, view.num_steps - int(view.series.column("step")[-1]))


def newest_baseline(view: RunView) -> log.BaselineEvaluated | None:
    """The loss of the simple model to compare with."""
    found = [event for event in view.events if isinstance(event, log.BaselineEvaluated)]
    return found[-1] if found and math.isfinite(found[-1].loss) else None


def _loss_tile(view: RunView) -> Tile | None:
    losses = [e.loss for e in view.events if isinstance(e, log.Evaluated)]
    train = view.series.column("train/loss")
    if view.is_program:  # not every line of a script has a loss
        train = train[np.isfinite(train)]
    if not losses:
        if not len(train) or not np.isfinite(train).any():
            return None
        value = f"{_loss(train[0])} → {_loss(train[-1])}"
        return Tile(name="Training loss", value=value, note="no evaluation yet", how="measured")
    value = _loss(losses[-1])
    if len(losses) > 1:
        value = f"{_loss(losses[0])} → {value}"
    is_known = view.unit == "tokens" and not view.is_program
    note = "nats per token" if is_known else "on data that is not trained on"
    baseline = newest_baseline(view)
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if baseline is not None and known:
        gap = baseline.loss - known[-1]
        side = "below" if gap >= 0 else "above"
        note = f"{abs(gap):.2f} {side} a {baseline.name} ({_loss(baseline.loss)})"
    if len(train):
        note += f"; training loss {_loss(train[-1])}"
    return Tile(name="Evaluation loss", value=value, note=note, how="measured")


def _loss(loss: float | None) -> str:
    return f"{loss:.3f}" if loss is not None and math.isfinite(loss) else "not finite"


def _median(view: RunView, name: str) -> float | None:
    column = view.series.column(name)
    known = column[np.isfinite(column)]
    return float(np.median(known)) if len(known) else None


def _rate_tile(view: RunView) -> Tile | None:
    rate = _median(view, "speed/tokens_per_s")
    if rate is None:
        return None
    predicted = view.plan.estimate.tokens_per_s if view.plan is not None else None
    note = "median of the steps"
    if predicted is not None and view.unit == "tokens":
        note += f"; {format_count(predicted)} estimated"
    waits, steps = view.series.column("time/data_s"), view.series.column("speed/step_s")
    known = np.isfinite(waits) & np.isfinite(steps)
    known[_firsts(view)] = False  # the data is opened in them
    if known.any():
        share = float(waits[known].sum() / steps[known].sum())
        note += f"; {format_share(share)} of the time after the first step waiting for data"
    return Tile(
        name="Throughput",
        value=f"{format_count(rate)} {view.unit}/s",
        note=note,
        how="measured",
    )


def _firsts(view: RunView) -> list[int]:
    """Places of the first line of the run, and after every start: of a resumed run, or of ranks
    that a failure ended."""
    at = view.series.column("at")
    starts = [event.at for event in view.events if isinstance(event, log.TrainingStarted)]
    return sorted({0, *np.searchsorted(at, starts).tolist()} - {len(at)})


def _mfu_tile(view: RunView) -> Tile | None:
    reached = _median(view, "speed/mfu")
    if reached is None:
        return None
    planned = view.plan.estimate.mfu if view.plan is not None else None
    note = "of the ranks' peak, median" + ("" if planned is None else f"; {planned:.1%} planned")
    return Tile(name="MFU", value=f"{reached:.1%}", note=note, how="measured")


def _wall_tile(view: RunView, parts: tuple[Part, ...]) -> Tile | None:
    seconds = sum(part.end - part.start for part in parts)
    if seconds <= 0:
        return None
    steps = view.series.column("step")
    # A line of a script is about all steps since the line before.
    each = view.series.column("speed/step_s") * np.diff(steps, prepend=steps[:1] - 1)
    training = float(np.nansum(each))
    return Tile(
        name="Wall time",
        value=format_seconds(seconds),
        note=f"{format_share(min(1.0, training / seconds))} of it in steps that were kept",
        how="measured",
    )


def _failure_tile(broken: list[Failure], how: str) -> Tile | None:
    if how == "new":
        return None
    back = [failure.recovered for failure in broken if failure.recovered is not None]
    if not broken:
        return Tile(name="Failures", value="none", note="no restart was needed", how="measured")
    note = "not recovered"
    if back:
        down = format_seconds(sum(event.downtime_s for event in back))
        again = counted(sum(event.steps_lost for event in back), "step")
        note = f"back in {down}, {again} repeated"
        if len(back) < len(broken):
            note += f"; {len(broken) - len(back)} not recovered"
        note += "".join(f"; {failure.changed}" for failure in broken if failure.changed)
    return Tile(name="Failures", value=str(len(broken)), note=note, how="measured")


def _memory_tile(view: RunView) -> Tile | None:
    ends = [e for e in view.events if isinstance(e, log.RunFinished) and e.peak_bytes]
    of_rank_0 = view.series.newest("memory/peak_bytes")
    seen = most_bytes(ends[-1].peak_bytes) if ends else of_rank_0
    if seen is None:
        return None
    held = view.series.newest("memory/reserved_bytes")
    predicted = comparable_bytes(view.plan) if view.plan is not None else None
    return Tile(
        name="Memory",
        value=format_bytes(seen),
        note=("at the fullest rank" if ends else "of rank 0 so far")
        + (f"; {format_bytes(predicted)} estimated" if predicted is not None else "")
        + (f"; {format_bytes(held)} reserved by rank 0's allocator" if held is not None else ""),
        how="measured",
    )


def _cost_tile(view: RunView, how: str) -> Tile | None:
    """Dollars so far and at the end; without a tile where the plan has no price."""
    if view.plan is None or view.plan.cost is None or how == "new":
        return None
    is_on = how == "running"
    parts = view.parts()
    ran_s = sum(part.end - part.start for part in parts)
    if is_on and parts and view.now_s is not None:
        ran_s += max(0.0, view.now_s - parts[-1].end)
    left = left_s(view) if is_on else None
    usd, at_end, source = cost_of(view.plan, ran_s, left_s=left, is_on=is_on)
    until = "" if at_end is None else f"${at_end:,.2f} at the end; "
    return Tile(
        name="Cost so far" if is_on else "Cost",
        value=f"${usd:,.2f}",
        note=f"{until}price of {source}",
        how="estimated",
    )


def _facts(view: RunView, end: log.RunFinished | None) -> list[tuple[str, str]]:
    """Name and value of what identifies the run."""
    plan = view.plan
    started = [e for e in view.events if isinstance(e, log.RunStarted)]
    began = started[0].at if started else view.created_at
    clock = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))
    facts = [("Started" if started else "Made", clock)]
    if plan is not None:
        facts.append(("Layout", f"{plan.layout_name}, {plan.precision}"))
        facts.append(("Cluster", plan.cluster.name))
    elif started:
        facts.append(("Program", started[-1].layout))
    if view.data_padding is not None:
        facts.append(("Padding", f"{view.data_padding:.2%} of a batch"))
    if end is not None:
        refits = [each for each in view.failures() if each.changed and each.recovered]
        ends = [e for e in view.events if isinstance(e, log.RunFinished)]
        facts.append(("Restarts", str(sum(e.restarts for e in ends) + len(refits))))
    if end is not None and end.state_digest is not None:
        facts.append(("State SHA-256", end.state_digest))
    facts.append(("Folder", view.folder))
    return facts
