"""The page of a run whose program is not one of ours: what was started, and what became of it."""

import time
from collections.abc import Sequence
from html import escape

from paceline.record import events as log

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;"
    "vertical-align:top}pre{overflow-x:auto;background:#f4f4f4;padding:.6rem}"
)


def render_script_page(
    *, name: str, folder: str, job_text: str, events: Sequence[log.AnyEvent]
) -> str:
    """One HTML file that needs nothing else; the same for the same record."""
    finished = [event for event in events if isinstance(event, log.RunFinished)]
    end = finished[-1] if finished else None
    outcome = end.outcome if end is not None else "no end on record"
    restarts = sum(event.restarts for event in finished)
    rows = "".join(_row(event) for event in events if not isinstance(event, log.RunStarted))
    reason = f"<p>{escape(end.reason)}</p>" if end is not None and end.reason else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(name)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(name)}: {escape(outcome)}</h1>"
        f"<p>{restarts} restart(s) of all processes. A program of its own: what it computed, and "
        f"whether it went on from where it was, is its own word.</p>{reason}"
        f"<h2>What happened</h2><table><tr><th>time<th>attempt<th>what{rows}</table>"
        f"<h2>Job</h2><pre>{escape(job_text)}</pre><p>{escape(folder)}</p></html>\n"
    )


def _row(event: log.AnyEvent) -> str:
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.at))
    return f"<tr><td>{clock}<td>{event.generation}<td>{_what(event)}"


def _what(event: log.AnyEvent) -> str:
    match event:
        case log.WorkerStarted():
            return f"rank {event.rank} started, process {event.pid}"
        case log.WorkerLost():
            return escape(f"rank {event.rank} lost ({event.cause}): {event.how}")
        case log.WorkerStuck():
            text = escape(event.stacks)
            return f"rank {event.rank}, silent for {event.waited_s:.1f} s<pre>{text}</pre>"
        case log.Noted():
            return escape(event.text)
        case log.StopAsked():
            return escape(f"asked to stop by {event.by}")
        case log.RunFinished():
            return escape(f"{event.outcome}: {event.reason}" if event.reason else event.outcome)
        case _:
            return escape(type(event).__name__)
