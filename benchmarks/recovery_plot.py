"""Draw one recovery of a run on the clock, as one SVG picture: the one in docs/recovery.md.

.venv/bin/python benchmarks/recovery_plot.py RUN docs/recovery.svg

Above the steps as rank 0 finished them, below what the recovery was made of. Not shown: what other
ranks did meanwhile, as the record has rank 0's steps alone.
"""

import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from paceline.record import events as log
from paceline.record.events import read_events
from paceline.record.metrics import StepMetrics, read_all_metrics
from paceline.units import format_seconds

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.size": 11,
    "text.color": "#808080",  # readable on white and on black
    "axes.labelcolor": "#808080",
    "xtick.color": "#808080",
    "ytick.color": "#808080",
    "axes.edgecolor": "#808080",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
}
_PHASES = (
    ("detect_s", "detect", "#d1495b"),
    ("fence_s", "fence", "#edae49"),
    ("start_s", "meet", "#66a182"),
    ("restore_s", "state", "#2e86ab"),
    ("first_step_s", "first step", "#7d5ba6"),
)
_STEP, _AGAIN = "#9aa5b1", "#c97b63"
_ROOM = 0.6
"""Shown before and after the recovery, in downtimes."""


def recovery_to_show(events: Sequence[log.AnyEvent]) -> log.Recovered | None:
    """The recovery with the middle downtime, of those whose fault was seen where there are any."""
    every = [event for event in events if isinstance(event, log.Recovered)]
    seen = [event for event in every if event.detect_s is not None] or every
    ordered = sorted(seen, key=lambda event: (event.downtime_s, event.at))
    return ordered[len(ordered) // 2] if ordered else None


def draw_recovery(
    recovery: log.Recovered, events: Sequence[log.AnyEvent], lines: Sequence[StepMetrics]
) -> str:
    """An SVG file's text."""
    began = recovery.at - recovery.downtime_s
    low = -recovery.downtime_s * _ROOM
    high = recovery.downtime_s * (1 + _ROOM)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 2.7), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        _draw_steps(axes, recovery, lines, began, (low, high))
        _draw_phases(axes, recovery)
        axes.axvline(0, color=_PHASES[0][2], linewidth=1.2)
        axes.axvline(recovery.downtime_s, color=_PHASES[-1][2], linewidth=1.2)
        axes.set_xlim(low, high)
        axes.set_ylim(-0.5, 1.75)
        axes.set_yticks([1, 0], ["steps", "recovery"])
        axes.set_xlabel("seconds after the failure")
        axes.set_title(_title(recovery, events), loc="left", parse_math=False)
        figure.legend(loc="outside lower center", ncols=len(_PHASES), frameon=False, fontsize=10)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw_steps(
    axes: Any,
    recovery: log.Recovered,
    lines: Sequence[StepMetrics],
    began: float,
    shown: tuple[float, float],
) -> None:
    near = [
        line for line in lines if shown[0] <= line.at - began <= shown[1] + (line.step_s or 0.0)
    ]
    labelled = max(1, len(near) // 12)
    for index, line in enumerate(near):
        again = line.generation >= recovery.generation and line.step <= recovery.failed_after_step
        end = line.at - began
        start = max(shown[0], end - (line.step_s or 0.0))
        axes.broken_barh(
            [(start, max(0.0, end - start))],
            (0.7, 0.6),
            facecolor=_AGAIN if again else _STEP,
            edgecolor="white",
            linewidth=0.6,
        )
        if index % labelled == 0 and start < end <= shown[1]:
            axes.annotate(str(line.step), ((start + end) / 2, 1.36), ha="center", fontsize=9)


def _draw_phases(axes: Any, recovery: log.Recovered) -> None:
    at = 0.0
    for field, name, color in _PHASES:
        seconds = getattr(recovery, field) or 0.0
        label = f"{name} {format_seconds(seconds)}"
        axes.broken_barh([(at, seconds)], (-0.3, 0.6), facecolor=color, linewidth=0, label=label)
        at += seconds


def _title(recovery: log.Recovered, events: Sequence[log.AnyEvent]) -> str:
    lost = [
        event
        for event in events
        if isinstance(event, log.WorkerLost)
        and event.rank == recovery.lost_rank
        and event.at <= recovery.at
    ]
    how = lost[-1].how.partition("\n")[0][:60] if lost else "lost"
    return (
        f"rank {recovery.lost_rank} {how} after step {recovery.failed_after_step}: "
        f"back in {format_seconds(recovery.downtime_s)}, {recovery.steps_lost} steps lost"
    )


def main() -> None:
    """Write the picture."""
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    events = read_events(run / "events.jsonl")
    shown = recovery_to_show(events)
    if shown is None:
        raise SystemExit(f"{run} had nothing to recover from")
    out.write_text(draw_recovery(shown, events, read_all_metrics(run / "metrics.jsonl")))


if __name__ == "__main__":
    main()
