"""The page of a script's run: how far it came, its losses, where its time went, what happened."""

import math
import time
from collections.abc import Iterator, Sequence
from html import escape

from paceline.record import events as log
from paceline.record.metrics import StepMetrics
from paceline.record.script_profile import ScriptProfile
from paceline.report.plots import LossData, draw_loss
from paceline.report.script_text import profile_rows
from paceline.units import counted

_STYLE = (
    ":root{color-scheme:light dark;--ink:light-dark(#111,#eee);--muted:light-dark(#555,#aaa);"
    "--line:light-dark(#ddd,#444);--train:#2a6fdb;--raw:light-dark(#a9c4f0,#35507d);--held:#d9822b;"
    "--base:#777;--bad:#c23030;--shade:#999}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;"
    "vertical-align:top}pre{overflow-x:auto;padding:.6rem;border:1px solid var(--line)}"
    "svg{max-width:100%;height:auto}"
)


def render_script_page(
    *,
    name: str,
    folder: str,
    job_text: str,
    events: Sequence[log.AnyEvent],
    metrics: Sequence[StepMetrics] = (),
    profile: ScriptProfile | None = None,
) -> str:
    """One HTML file that needs nothing else; the same for the same record. What is not known has
    no place on it.

    Args:
        name: Of the run.
        folder: Where it is.
        job_text: The resolved job file.
        events: In the order they were written.
        metrics: The newest line of every step.
        profile: Where the time of its steps went, if it was measured.
    """
    finished = [event for event in events if isinstance(event, log.RunFinished)]
    end = finished[-1] if finished else None
    outcome = end.outcome if end is not None else "no end on record"
    restarts = counted(sum(event.restarts for event in finished), "restart")
    rows = "".join(_row(event) for event in events if not isinstance(event, log.RunStarted))
    reason = f"<p>{escape(end.reason)}</p>" if end is not None and end.reason else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(name)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(name)}: {escape(outcome)}</h1>"
        f"<p>{restarts} of all processes. {escape(' '.join(_facts(events, metrics)))}</p>{reason}"
        f"{_curve(events, metrics)}{_profile(profile)}"
        f"<h2>What happened</h2><table><tr><th>time (UTC)<th>attempt<th>what{rows}</table>"
        f"<h2>Job</h2><pre>{escape(job_text)}</pre><p>{escape(folder)}</p></html>\n"
    )


def _facts(events: Sequence[log.AnyEvent], metrics: Sequence[StepMetrics]) -> Iterator[str]:
    if not metrics:
        yield "It printed and logged no steps or losses."
        return
    of = f" of {metrics[-1].num_steps:,}" if metrics[-1].num_steps else ""
    yield f"Step {metrics[-1].step:,}{of}."
    losses = [(line.step, line.loss) for line in metrics if line.loss is not None]
    if losses:
        yield f"Loss {losses[-1][1]:.4g} at step {losses[-1][0]:,}, {losses[0][1]:.4g} at first."
    evaluated = [e for e in events if isinstance(e, log.Evaluated) and e.loss is not None]
    if evaluated:
        yield f"Evaluation loss {evaluated[-1].loss:.4g} at step {evaluated[-1].step:,}."
    yield "Numbers are the script's own; Paceline has not checked them."


def _curve(events: Sequence[log.AnyEvent], metrics: Sequence[StepMetrics]) -> str:
    known = [(line.step, line.loss) for line in metrics if line.loss is not None]
    if len(known) < 2:
        return ""
    evaluated = [e for e in events if isinstance(e, log.Evaluated)]
    data = LossData(
        x=[step for step, _ in known],
        loss=[loss for _, loss in known],
        held_x=[e.step for e in evaluated],
        held_loss=[math.nan if e.loss is None else e.loss for e in evaluated],
    )
    curve = draw_loss(data, name="loss", label="Loss by step", by_time=False)
    return f"<h2>Loss</h2>{curve.wide}"


def _profile(profile: ScriptProfile | None) -> str:
    if profile is None:
        return ""
    head, *rows = profile_rows(profile)
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    titles = "".join(f"<th>{escape(cell)}" for cell in head)
    return f"<h2>Where a step's time goes</h2><table><tr>{titles}{cells}</table>"


def _row(event: log.AnyEvent) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.at))
    return f"<tr><td>{clock}<td>{event.generation}<td>{_what(event)}"


def _what(event: log.AnyEvent) -> str:
    match event:
        case log.WorkerStarted():
            return f"rank {event.rank} started, process {event.pid}"
        case log.WorkerLost():
            words = f": {event.detail}" if event.detail else ""
            return escape(f"rank {event.rank} lost ({event.cause}): {event.how}{words}")
        case log.WorkerStuck():
            text = escape(event.stacks)
            return f"rank {event.rank}, silent for {event.waited_s:.1f} s<pre>{text}</pre>"
        case log.Evaluated():
            loss = "not finite" if event.loss is None else f"{event.loss:.4g}"
            return f"evaluation loss after step {event.step}: {loss}"
        case log.CheckpointSaved():
            return escape(f"checkpoint of step {event.step}: {event.checkpoint}")
        case log.Noted():
            return escape(event.text)
        case log.StopAsked():
            return escape(f"asked to stop by {event.by}")
        case log.RunFinished():
            return escape(f"{event.outcome}: {event.reason}" if event.reason else event.outcome)
        case _:
            return escape(type(event).__name__)
