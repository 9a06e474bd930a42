"""What the page's curves are drawn from: a run's lines and events, put on an axis."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.metrics import StepMetrics
from paceline.report.plots import Curve, LossData, Mark, draw_loss, draw_throughput
from paceline.report.timeline import Failure, RunningClock, failures, newest_lines, parts
from paceline.units import format_seconds

_MOST_LOGGED = 24
"""Names that are drawn. A guess: more make a page that nobody reads to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """The curves; None where there is nothing to draw."""

    loss_by_step: Curve | None
    loss_by_time: Curve | None
    throughput: Curve | None
    logged: Mapping[str, Curve] = field(default_factory=dict)
    """Each name that the program logged, by step."""


def draw_curves(record: RunRecord) -> Curves:
    """Draw whatever the record has points for."""
    steps = newest_lines(record)
    held = _held_out(record)
    if not steps and not held:
        return Curves(loss_by_step=None, loss_by_time=None, throughput=None)
    every = parts(record)
    clock = RunningClock(every)
    broken = [failure for part in every for failure in failures(part)]
    loss_by_step = draw_loss(
        _by_step(record, steps, held, broken),
        name="loss-step",
        label="Training and held-out loss by step",
        by_time=False,
    )
    logged = _logged(steps, [Mark(each.step, failure_label(each), each.step) for each in broken])
    if not every:
        return Curves(loss_by_step=loss_by_step, loss_by_time=None, throughput=None, logged=logged)
    marks = _marks_by_time(record, broken, clock)
    x = [clock(line.at) for line in record.metrics]
    breaks = _breaks(record, clock)
    loss_by_time = draw_loss(
        LossData(
            x=x,
            loss=[number(line.loss) for line in record.metrics],
            breaks=breaks,
            held_x=[clock(event.at) for event in _evaluations(record)],
            held_loss=[number(event.loss) for event in _evaluations(record)],
            marks=marks,
        ),
        name="loss-time",
        label="Loss by time, with the gaps of the recoveries",
        by_time=True,
    )
    throughput = draw_throughput(
        x,
        [number(line.tokens_per_s) for line in record.metrics],
        breaks,
        [Mark(mark.x, "", mark.until, mark.is_bad) for mark in marks],
        median=median_rate(record),
        name="throughput",
        label="Throughput by time",
    )
    return Curves(
        loss_by_step=loss_by_step,
        loss_by_time=loss_by_time,
        throughput=throughput if x else None,
        logged=logged,
    )


def median_rate(record: RunRecord) -> float | None:
    """Median of the steps' tokens (or samples) a second; None without a step."""
    rates = [number(line.tokens_per_s) for line in newest_lines(record)]
    return median(known) if (known := [rate for rate in rates if math.isfinite(rate)]) else None


def number(value: float | None) -> float:
    """A loss as a float: JSON has no NaN and says null."""
    return math.nan if value is None else value


def _by_step(
    record: RunRecord,
    steps: list[StepMetrics],
    held: dict[int, float],
    broken: list[Failure],
) -> LossData:
    baseline = newest_baseline(record)
    again = [failure.recovered for failure in broken if failure.recovered is not None]
    return LossData(
        x=[line.step for line in steps],
        loss=[number(line.loss) for line in steps],
        held_x=list(held),
        held_loss=list(held.values()),
        baseline=baseline.loss if baseline is not None else None,
        baseline_name=baseline.name if baseline is not None else "",
        marks=[Mark(failure.step, failure_label(failure), failure.step) for failure in broken],
        shades=[
            (event.resumed_from_step, event.failed_after_step)
            for event in again
            if event.steps_lost
        ],
        refused_x=[line.step for line in steps if not line.applied],
    )


def newest_baseline(record: RunRecord) -> log.BaselineEvaluated | None:
    """The loss of the simple model to compare with."""
    found = [event for event in record.events if isinstance(event, log.BaselineEvaluated)]
    return found[-1] if found and math.isfinite(number(found[-1].loss)) else None


def failure_label(failure: Failure) -> str:
    """What happened, short enough for a plot."""
    how = failure.lost.how
    return f"rank {failure.lost.rank} {how if len(how) <= 32 else how[:31] + '…'}"


def _logged(steps: list[StepMetrics], marks: list[Mark]) -> dict[str, Curve]:
    names = list(dict.fromkeys(name for line in steps for name in line.logged))
    found = {}
    for index, name in enumerate(names[:_MOST_LOGGED]):
        having = [line for line in steps if name in line.logged]
        data = LossData(
            x=[line.step for line in having],
            loss=[number(line.logged[name]) for line in having],
            marks=marks,
        )
        found[name] = draw_loss(
            data, name=f"logged-{index}", label=f"{name} by step", by_time=False
        )
    return found


def _marks_by_time(record: RunRecord, broken: list[Failure], clock: RunningClock) -> list[Mark]:
    marks = []
    for failure in broken:
        recovered, at = failure.recovered, failure.lost.at
        if recovered is None:
            marks.append(Mark(clock(at), failure_label(failure), clock(at)))
            continue
        label = f"rank {failure.lost.rank} lost, back in {format_seconds(recovered.downtime_s)}"
        marks.append(Mark(clock(recovered.at - recovered.downtime_s), label, clock(recovered.at)))
    marks += [
        Mark(clock(part.start), "resumed", clock(part.start), is_bad=False)
        for part in clock.parts[1:]
    ]
    return sorted(marks, key=lambda mark: mark.x)


def _breaks(record: RunRecord, clock: RunningClock) -> list[int]:
    """Where the workers had been started anew between two lines."""
    starts = [part.start for part in clock.parts]

    def key(line: StepMetrics) -> tuple[int, int]:
        return line.generation, sum(start <= line.at for start in starts)

    keys = [key(line) for line in record.metrics]
    return [i for i, (one, other) in enumerate(pairwise(keys), start=1) if one != other]


def _evaluations(record: RunRecord) -> list[log.Evaluated]:
    return [event for event in record.events if isinstance(event, log.Evaluated)]


def _held_out(record: RunRecord) -> dict[int, float]:
    """Step -> newest held-out loss, in step order."""
    newest = {event.step: number(event.loss) for event in _evaluations(record)}
    return dict(sorted(newest.items()))
