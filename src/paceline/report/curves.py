"""A run's curves as plain numbers for its page, with what was predicted of them.

The page draws them (`static/page.js`): live as they grow, or frozen in a report.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.record import events as log
from paceline.record.metric_names import METRICS, numbers_of_evaluation
from paceline.record.series import COLUMNS, Column, Series, Thin, thinned
from paceline.report.head import newest_baseline
from paceline.report.sections import comparable_bytes
from paceline.report.view import RunView

BUCKETS = 1200
"""Stretches that a long curve is cut into: about one for each pixel of a wide screen."""

_MOST_LOGGED = 24
"""Names of a program's own that are drawn. A guess: more make a page that nobody reads."""

_TITLES = {
    "train/loss": "Loss",
    "train/accuracy": "Accuracy",
    "train/grad_norm": "Gradient norm",
    "train/learning_rate": "Learning rate",
    "speed/tokens_per_s": "Tokens a second",
    "speed/step_s": "Time of a step",
    "speed/mfu": "MFU",
    "memory/peak_bytes": "Memory of rank 0",
    "gpu/utilization": "GPU utilisation",
    "gpu/temperature_c": "GPU temperature",
    "gpu/power_w": "GPU power",
    "gpu/memory_bytes": "GPU memory",
    "host/cpu_utilization": "Processor utilisation",
    "host/memory_bytes": "Host memory",
    "host/received_bytes_per_s": "Network, received",
    "host/sent_bytes_per_s": "Network, sent",
}
"""Metric -> title, in the order in which the charts stand."""

_KINDS = {
    "share": "percent",
    "tokens/s": "count",
    "s": "seconds",
    "bytes": "bytes",
    "bytes/s": "rate",
    "°C": "celsius",
    "W": "watts",
}
"""Unit in the table of metrics -> how the page writes such numbers."""

_MACHINE_POINTS = 600
"""Points of a machine's curve. A guess: half as many as of the run's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """How one chart is labelled and what was predicted for it."""

    name: str
    title: str
    kind: str
    """How numbers are written: one of `_KINDS`, or `number`."""

    band: tuple[float, float] | None = None
    """Smallest and largest value that the plan expects."""

    lines: tuple[tuple[float, str], ...] = ()
    """Dashed lines to compare with, and what each is."""


def charts_of(view: RunView) -> list[Chart]:
    """Every chart that the run has numbers for."""
    titles = {**_TITLES, "speed/tokens_per_s": f"{view.unit.capitalize()} a second"}
    charts = [
        Chart(
            name=name,
            title=title,
            kind=_KINDS.get(METRICS[name].unit, "number"),
            band=_band(view, name),
            lines=tuple(_lines(view, name)),
        )
        for name, title in titles.items()
        if name in view.machines.names or (name in COLUMNS and view.series.newest(name) is not None)
    ]
    return charts + [
        Chart(name=name, title=name, kind="number") for name in view.series.logged[:_MOST_LOGGED]
    ]


def _band(view: RunView, name: str) -> tuple[float, float] | None:
    if view.plan is None:
        return None
    estimate = view.plan.estimate
    low, middle, high = estimate.step_low_s, estimate.step_s, estimate.step_high_s
    if low is None or middle is None or high is None:
        return None
    if name == "speed/step_s":
        return low, high
    if name == "speed/tokens_per_s" and estimate.tokens_per_s and view.unit == "tokens":
        return estimate.tokens_per_s * middle / high, estimate.tokens_per_s * middle / low
    if name == "speed/mfu" and estimate.mfu:
        return estimate.mfu * middle / high, estimate.mfu * middle / low
    return None


def _lines(view: RunView, name: str) -> list[tuple[float, str]]:
    plan, baseline = view.plan, newest_baseline(view)
    if name == "train/loss" and baseline is not None:
        return [(baseline.loss, f"evaluation loss of a {baseline.name}")]
    if name != "memory/peak_bytes" or plan is None:
        return []
    predicted = comparable_bytes(plan)
    limit = [(float(plan.cluster.usable_bytes), "usable")]
    return limit if predicted is None else [(float(predicted), "estimated"), *limit]


def tables_of(
    view: RunView, *, first: float = -math.inf, last: float = math.inf, buckets: int = BUCKETS
) -> list[dict[str, Any]]:
    """Tables of numbers, each with its own times: steps', evaluations' and machines'.

    Args:
        first: Leave out earlier steps.
        last: Leave out later steps.
        buckets: Points of a column at most.

    Returns:
        For each table `step`, `at` and `curves`: name -> `mean`, and `low` and `high` where
        several steps share a point.
    """
    series = view.series
    steps = series.column("step")
    rows = slice(*np.searchsorted(steps, [first, last], side="left").tolist())
    if last == math.inf:
        rows = slice(rows.start, None)
    return [
        table(series, rows, names_of(view), buckets),
        *_evaluations(view),
        *_machines(view),
    ]


def names_of(view: RunView) -> list[str]:
    """Metrics of steps that are drawn."""
    of_steps = {*COLUMNS, *view.series.logged}
    return [chart.name for chart in charts_of(view) if chart.name in of_steps]


def table(series: Series, rows: slice, names: list[str], buckets: int = BUCKETS) -> dict[str, Any]:
    """Some rows of a run's columns, thinned where they are many."""
    columns = [series.column(name)[rows] for name in ("step", "at", *names)]
    step, at, *thin = thinned(columns, buckets)
    return {
        "step": _numbers(step.high),
        "at": [round(value, 2) for value in at.high.tolist()],
        "curves": {name: _curve(each) for name, each in zip(names, thin, strict=True)},
    }


def _curve(thin: Thin) -> Mapping[str, Any]:
    mean = _numbers(thin.mean)
    if thin.low is thin.mean:
        return {"mean": mean}
    return {"mean": mean, "low": _numbers(thin.low), "high": _numbers(thin.high)}


def _numbers(column: Column) -> list[float | None]:
    """Six digits are enough to draw. JSON has no NaN."""
    return [
        None if not math.isfinite(value) else int(value) if value == int(value) else _short(value)
        for value in column.tolist()
    ]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _evaluations(view: RunView) -> list[dict[str, Any]]:
    """The newest evaluation of every step, as a table; none where nothing was evaluated."""
    newest = {e.step: e for e in view.events if isinstance(e, log.Evaluated)}
    events = [newest[step] for step in sorted(newest)]
    if not events:
        return []
    every = [numbers_of_evaluation(event) for event in events]
    columns = {
        name: [numbers.get(name) for numbers in every]
        for name in ("eval/loss", "eval/accuracy")
        if any(name in numbers for numbers in every)
    }
    return [
        {
            "step": [event.step for event in events],
            "at": [round(event.at, 2) for event in events],
            "curves": {
                name: {"mean": _numbers(np.array(values, dtype=float))}
                for name, values in columns.items()
            },
        }
    ]


def _machines(view: RunView) -> list[dict[str, Any]]:
    """What the machines did, as a table; its steps are those that were under way."""
    at, curves = view.machines.binned(_MACHINE_POINTS)
    if not len(at):
        return []
    steps, ends = view.series.column("step"), view.series.column("at")
    under_way = np.interp(at, ends, steps) if len(steps) else at - at[0]
    shown = {name: thin for name, thin in curves.items() if name in _TITLES}
    return [
        {
            "step": _numbers(np.maximum.accumulate(under_way)),
            "at": [round(value, 2) for value in at.tolist()],
            "curves": {name: _curve(thin) for name, thin in shown.items()},
        }
    ]
