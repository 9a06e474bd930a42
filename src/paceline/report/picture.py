"""What a run's page shows above its tables, as one JSON-ready value: live, or frozen in a report.

Leaves out: drawing (`static/page.js`) and the tables further down (`page.py`).
"""

from dataclasses import asdict
from math import inf
from typing import Any

from paceline.record import events as log
from paceline.report.curves import charts_of, tables_of
from paceline.report.happenings import alerts, happenings, marks, ranks_of
from paceline.report.head import head_of
from paceline.report.view import RunView

_SEEN_S = 60.0
"""How long the phase of a rank is shown after it was seen: two of the longest times between samples
of machines, which are 30 s apart."""


def picture(view: RunView) -> dict[str, Any]:
    """Everything that is drawn first."""
    return {"head": head(view), "happened": happened(view), "tables": tables_of(view)}


def head(view: RunView) -> dict[str, Any]:
    """What changes with every step, in some kilobytes."""
    return {
        "name": view.name,
        "unit": view.unit,
        "steps": view.num_steps,
        "charts": [asdict(chart) for chart in charts_of(view)],
        **asdict(head_of(view)),
    }


def happened(view: RunView) -> dict[str, Any]:
    """What changes with an event; the whole of it, as it is small."""
    parts = view.parts()
    spans: list[list[float | None]] = [[part.start, part.end] for part in parts]
    if view.is_running and parts and parts[-1].finished is None:
        spans[-1][1] = None
    return {
        "parts": spans,
        "events": [asdict(each) for each in happenings(view.events)],
        "marks": marks(view.events),
        "alerts": alerts(view.events),
        "ranks": ranks_of(
            view.events,
            is_running=view.is_running,
            stepped_at=view.series.newest("at"),
            seen=view.machines.ranks_since((view.now_s or inf) - _SEEN_S),
        ),
        "refused": [e.step for e in view.events if isinstance(e, log.StepRefused)][-200:],
    }
