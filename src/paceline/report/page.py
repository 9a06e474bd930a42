"""A run's page: one HTML file with everything in it, from the run's record.

Needs no network, script or font from elsewhere, and is the same to the byte for the same record.
The words and the look are in `templates/page.html.j2`; what is shown is gathered here.
"""

import math
import time
from dataclasses import dataclass
from statistics import median

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.metrics import most_bytes
from paceline.report.curves import (
    Curves,
    draw_curves,
    median_rate,
    newest_baseline,
    number,
)
from paceline.report.plots import Curve
from paceline.report.recovery_plot import draw_recovery, inline, recovery_to_show
from paceline.report.sections import (
    NAMES,
    checkpoint_rows,
    comparable_bytes,
    failure_rows,
    format_share,
    front_points,
    gpu_health_rows,
    layout_rows,
    memory_section,
    time_section,
)
from paceline.report.time_account import TimeShare, time_account
from paceline.report.timeline import (
    Failure,
    RunningClock,
    failures,
    newest_lines,
    outcome,
    parts,
)
from paceline.units import counted, format_bytes, format_count, format_seconds

_MOST_ROWS = 200
"""Longer tables are cut, and say so."""

_MOST_LAYOUTS = 12


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
    go_on: str
    """The command that goes on with the run, where that makes sense."""

    tiles: list[Tile]
    facts: list[tuple[str, str]]


def render_page(record: RunRecord) -> str:
    """The whole page as text."""
    every = parts(record)
    clock = RunningClock(every)
    broken = [(part, failure) for part in every for failure in failures(part)]
    account = time_account(record)
    end = every[-1].finished if every else None
    refused = [e for e in record.events if isinstance(e, log.StepRefused)]
    passed_over = [e for e in record.events if isinstance(e, log.CheckpointRefused)]
    gpu_health = gpu_health_rows(record, clock)
    curves = draw_curves(record)
    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        name=record.name,
        head=_head(record, account, [failure for _, failure in broken]),
        curves=_inline(curves),
        logged={name: _both(curve) for name, curve in curves.logged.items()},
        num_logged=len({name for line in record.metrics for name in line.logged}),
        has_held_out=any(isinstance(e, log.Evaluated) for e in record.events),
        baseline=newest_baseline(record),
        unit=_unit(record),
        time=time_section(account),
        num_parts=len(every),
        memory=memory_section(record, end),
        failures=failure_rows(broken[:_MOST_ROWS], clock),
        num_failures=len(broken),
        recovery=_recovery(record),
        phases=[NAMES[key] for key in ("detect", "fence", "start", "restore", "first_step")],
        refused=refused[:_MOST_ROWS],
        num_refused=len(refused),
        passed_over=passed_over[:_MOST_ROWS],
        gpu_health=gpu_health[:_MOST_ROWS],
        num_gpu_health=len(gpu_health),
        checkpoints=checkpoint_rows(record)[-_MOST_ROWS:],
        num_checkpoints=len(checkpoint_rows(record)),
        outputs=record.outputs,
        plan=record.plan,
        layouts=layout_rows(record.plan)[:_MOST_LAYOUTS] if record.plan is not None else [],
        num_layouts=record.plan.space_size if record.plan is not None else 0,
        front=front_points(record.plan) if record.plan is not None else [],
        job_text=record.job_text,
        versions=_versions(record),
        folder=record.folder,
    )


def _recovery(record: RunRecord) -> Markup | None:
    shown = recovery_to_show(record.events)
    return (
        None
        if shown is None
        else Markup(inline(draw_recovery(shown, record.events, record.metrics)))
    )


def _inline(curves: Curves) -> dict[str, Markup | None]:
    return {
        "loss_by_step": _both(curves.loss_by_step),
        "loss_by_time": _both(curves.loss_by_time),
        "throughput": _both(curves.throughput),
    }


def _both(curve: Curve | None) -> Markup | None:
    return None if curve is None else Markup(curve.wide + curve.narrow)


def _head(record: RunRecord, account: list[TimeShare], broken: list[Failure]) -> Head:
    how = outcome(record)
    last = [e for e in record.events if isinstance(e, log.RunFinished)]
    over = how in ("finished", "interrupted", "failed")
    reason = last[-1].reason if over and last and last[-1].reason else ""
    tiles = [_loss_tile(record), _rate_tile(record), _wall_tile(account)]
    tiles += [_failure_tile(broken, how), _memory_tile(record)]
    return Head(
        outcome=how,
        sentence=_sentence(record, how, account, broken),
        reason=reason,
        go_on=(
            f"paceline run --resume {record.folder}"
            if how in ("interrupted", "failed", "stopped")
            else ""
        ),
        tiles=[tile for tile in tiles if tile is not None],
        facts=_facts(record, last[-1] if over and last else None),
    )


def _sentence(record: RunRecord, how: str, account: list[TimeShare], broken: list[Failure]) -> str:
    """The run in one sentence."""
    lines = newest_lines(record)
    step, total = lines[-1].step if lines else 0, record.spec.train.steps
    started = [e for e in record.events if isinstance(e, log.RunStarted)]
    ranks = counted(started[-1].num_ranks, "rank") if started else "no rank yet"
    wall = format_seconds(sum(share.seconds for share in account)) if account else "no time"
    text = {
        "finished": f"Finished all {total:,} steps on {ranks} in {wall}",
        "interrupted": f"Stopped after step {step:,} of {total:,}, {wall} in",
        "failed": f"Failed after step {step:,} of {total:,}, {wall} in",
        "running": f"Running on {ranks}: step {step:,} of {total:,}, {wall} so far",
        "stopped": f"Its controller ended without a word after step {step:,} of {total:,}",
        "new": f"Not started yet: {total:,} steps to do",
    }.get(how, how)
    early = _early_end(record)
    if how == "finished" and early is not None:
        text = (
            f"Stopped early after step {early.step:,} of {total:,} on {ranks}, {wall} in: no "
            f"improvement in {counted(early.waited, 'evaluation')}, lowest held-out loss "
            f"{_loss(number(early.best_loss))} after step {early.best_step:,}"
        )
    recovered = sum(failure.recovered is not None for failure in broken)
    if recovered:
        times = {1: "once", 2: "twice"}.get(recovered, f"{recovered} times")
        text += f"; recovered by itself {times}"
    return text + "."


def _early_end(record: RunRecord) -> log.StoppedEarly | None:
    """How the newest part of the run ended before its last step; None where it did not."""
    kinds = log.StoppedEarly | log.TrainingStarted
    newest = [event for event in record.events if isinstance(event, kinds)][-1:]
    return next((event for event in newest if isinstance(event, log.StoppedEarly)), None)


def _loss_tile(record: RunRecord) -> Tile | None:
    losses = [e.loss for e in record.events if isinstance(e, log.Evaluated)]
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if not losses:
        lines = newest_lines(record)
        if not lines:
            return None
        value = f"{_loss(number(lines[0].loss))} → {_loss(number(lines[-1].loss))}"
        return Tile(
            name="Training loss", value=value, note="no held-out evaluation", how="measured"
        )
    value = _loss(number(losses[-1]))
    if len(losses) > 1:
        value = f"{_loss(number(losses[0]))} → {value}"
    note = "nats per token" if _unit(record) == "tokens" else "held out"
    baseline = newest_baseline(record)
    if baseline is not None and known:
        gap = baseline.loss - known[-1]
        side = "below" if gap >= 0 else "above"
        note = f"{abs(gap):.2f} {side} a {baseline.name} ({_loss(baseline.loss)})"
    return Tile(name="Held-out loss", value=value, note=note, how="measured")


def _loss(loss: float) -> str:
    return f"{loss:.3f}" if math.isfinite(loss) else "not finite"


def _rate_tile(record: RunRecord) -> Tile | None:
    rate = median_rate(record)
    if rate is None:
        return None
    predicted = record.plan.estimate.tokens_per_s if record.plan is not None else None
    unit = _unit(record)
    note = "median of the steps"
    if predicted is not None and unit == "tokens":
        note += f"; {format_count(predicted)} estimated"
    known = [line.mfu for line in record.metrics if line.mfu is not None]
    planned = record.plan.estimate.mfu if record.plan is not None else None
    if known and planned is not None:
        note += f"; MFU {median(known):.1%}, {planned:.1%} planned"
    lines = [line for line in newest_lines(record) if line.data_s is not None]
    if lines:
        waited = sum(line.data_s or 0.0 for line in lines) / sum(
            line.step_s or 0.0 for line in lines
        )
        note += f"; {format_share(waited)} of a step waiting for data"
    return Tile(
        name="Throughput", value=f"{format_count(rate)} {unit}/s", note=note, how="measured"
    )


def _unit(record: RunRecord) -> str:
    """`tokens`, or `samples` for a program that does not count tokens."""
    batch = record.spec.train.global_batch
    newest = record.metrics[-1:]
    per_step = [(line.tokens_per_s or 0.0) * (line.step_s or 0.0) for line in newest]
    counts_samples = bool(per_step) and abs(per_step[0] - batch) < 0.01 * batch
    return "samples" if counts_samples and record.spec.program is not None else "tokens"


def _wall_tile(account: list[TimeShare]) -> Tile | None:
    if not account:
        return None
    training = sum(share.share for share in account if share.group == "training")
    return Tile(
        name="Wall time",
        value=format_seconds(sum(share.seconds for share in account)),
        note=f"{format_share(training)} of it in training steps",
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
        note = f"back in {down}, {again} done again"
        if len(back) < len(broken):
            note += f"; {len(broken) - len(back)} not recovered"
    return Tile(name="Failures", value=str(len(broken)), note=note, how="measured")


def _memory_tile(record: RunRecord) -> Tile | None:
    ends = [e for e in record.events if isinstance(e, log.RunFinished) and e.peak_bytes]
    seen = most_bytes(ends[-1].peak_bytes if ends else (m.memory_bytes for m in record.metrics))
    held = most_bytes(m.reserved_bytes for m in record.metrics)
    predicted = comparable_bytes(record.plan) if record.plan is not None else None
    if seen is None:
        return None
    return Tile(
        name="Memory",
        value=format_bytes(seen),
        note="at the fullest rank"
        + (f"; {format_bytes(predicted)} estimated" if predicted is not None else "")
        + (f"; {format_bytes(held)} reserved by rank 0's allocator" if held is not None else ""),
        how="measured",
    )


def _facts(record: RunRecord, end: log.RunFinished | None) -> list[tuple[str, str]]:
    """Name and value of what identifies the run."""
    plan = record.plan
    started = [e for e in record.events if isinstance(e, log.RunStarted)]
    began = started[0].at if started else record.created_at
    facts = [("Started" if started else "Made", _utc(began))]
    if plan is not None:
        facts.append(("Layout", f"{plan.layout.name}, {plan.precision}"))
        facts.append(("Cluster", plan.cluster.name))
    if record.data_padding is not None:
        facts.append(("Padding", f"{record.data_padding:.2%} of a batch"))
    if end is not None:
        facts.append(("Restarts", str(end.restarts)))
    if end is not None and end.state_digest is not None:
        facts.append(("State SHA-256", end.state_digest))
    facts.append(("Folder", record.folder))
    return facts


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _versions(record: RunRecord) -> list[str]:
    """`paceline 0.1.0`, `python 3.11.7` ...: each that a part of the run was made with."""
    started = [event for event in record.events if isinstance(event, log.RunStarted)]
    return list(
        dict.fromkeys(f"{name} {version}" for e in started for name, version in e.versions.items())
    )
