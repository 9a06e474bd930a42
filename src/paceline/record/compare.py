"""Runs beside each other: how their jobs, plans and code differ, their curves, and whether they
computed the same bits.

The bits are compared by the digests that the runs recorded; nothing is computed again. What was
not recorded is unknown.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline.record.events import Evaluated
from paceline.record.metric_names import FIELDS, numbers_of_evaluation
from paceline.record.run_files import RunFiles, flat
from paceline.record.run_row import RunRow, read_files, standing_now

_POINTS = 200
"""Points of a curve: what a page or a model that reads JSON can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """One thing that every run has its own value of."""

    name: str
    values: tuple[Any, ...]
    """In the order of the runs; None is unknown, or not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric of all runs over the same stretches of steps; None where a run has no number."""

    name: str
    steps: list[int]
    """Last step of each stretch."""

    mean: list[list[float | None]]
    """Run -> stretch -> mean of its steps."""

    low: list[list[float | None]]
    high: list[list[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sameness:
    """Whether something was the same to the bit in two runs, step by step."""

    num_steps: int
    """Steps at which both runs recorded it; 0 means that it is unknown."""

    first_difference: int | None = None
    """First of these steps at which it differed; None where it never did."""

    @property
    def is_same(self) -> bool | None:
        """None is unknown."""
        return self.first_difference is None if self.num_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """A run's bits against those of the first run."""

    run: str
    samples: Sameness
    """The samples that were read."""

    losses: Sameness
    """The losses, as numbers that are equal or not."""

    state: Sameness
    """Parameters and optimizer state, by their digests."""

    largest_loss_difference: float | None
    """Relative, over the steps of both; None where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs beside each other."""

    runs: list[RunRow]
    settings: list[Values]
    """Settings of the jobs that differ; all of them where that was asked for."""

    num_same_settings: int
    plan: list[Values]
    """What the plans chose and predicted differently."""

    code: list[Values]
    """Commit, changes, Python and packages that differ."""

    measured: list[Values]
    """What came of the runs. Throughput and times are medians over all steps."""

    curves: list[Curve]
    bits: list[Bits]
    """One for each run after the first."""


def compare_runs(
    folders: Sequence[Path], *, points: int = _POINTS, all_settings: bool = False
) -> Comparison:
    """Runs beside each other, in the order given."""
    now_s = time.time()
    found = [read_files(folder) for folder in folders]
    rows = [standing_now(row, now_s) for row, _ in found]
    jobs = [job for _, job in found]
    differing, num_same = compare_settings(jobs)
    files = [RunFiles(folder) for folder in folders]
    steps = [_newest_of_each_step(one.lines("metrics.jsonl", _Line)) for one in files]
    evaluations = [_evaluations(one) for one in files]
    return Comparison(
        runs=rows,
        settings=_side_by_side(jobs) if all_settings else differing,
        num_same_settings=num_same,
        plan=[one for one in _side_by_side([_plan(one) for one in files]) if _differs(one)],
        code=[one for one in _side_by_side([_code(one) for one in files]) if _differs(one)],
        measured=_measured(rows, steps),
        curves=list(_curves(steps, evaluations, points)),
        bits=[
            _bits((rows[0], steps[0]), (row, lines))
            for row, lines in zip(rows[1:], steps[1:], strict=True)
        ],
    )


def compare_settings(jobs: Sequence[Mapping[str, Any]]) -> tuple[list[Values], int]:
    """Settings that are not the same in all jobs, and how many are.

    Args:
        jobs: Dotted name -> value, for each run.
    """
    settings = _side_by_side(jobs)
    differing = [one for one in settings if _differs(one)]
    return differing, len(settings) - len(differing)


_Line: Any = msgspec.defstruct(
    "_Line",
    [
        ("step", int),
        *((name, float | None, None) for name in FIELDS),
        ("samples_digest", str, ""),
        ("state_digest", str | None, None),
        ("logged", dict[str, float | None], msgspec.field(default_factory=dict)),
    ],
)
"""The fields of a step's line that are compared."""

_Steps = dict[int, Any]
"""Step -> its newest line."""

_Evaluations = dict[int, Mapping[str, float | None]]

_PLAN_LEFT_OUT = (
    *("decisions", "rejected", "pareto", "profile", "stages", "costs", "goodput", "state"),
    *("cluster.known", "cluster.levels", "length", "limits", "decoder"),
    *("space_size", "num_fitting"),
)
"""Parts of a plan that are about other layouts, repeat the job, or say how it was found."""


def _side_by_side(found: Sequence[Mapping[str, Any]]) -> list[Values]:
    names = dict.fromkeys(name for one in found for name in one)
    return [Values(name=name, values=tuple(one.get(name) for one in found)) for name in names]


def _differs(one: Values) -> bool:
    return any(value != one.values[0] for value in one.values)


def _plan(files: RunFiles) -> dict[str, Any]:
    plan = files.json("plan.json")
    found = flat({name: value for name, value in plan.items() if name not in _PLAN_LEFT_OUT})
    return {name: value for name, value in found if not name.startswith(_PLAN_LEFT_OUT)}


def _code(files: RunFiles) -> dict[str, Any]:
    start = files.last_start()
    if start is None:
        return {}
    code = start.code
    return {
        "commit": code.commit if code is not None else None,
        "dirty": code.is_dirty if code is not None else None,
        "diff": code.diff_sha256 if code is not None else None,
        "host": start.host,
        "python": start.python,
        **{f"package {name}": version for name, version in start.packages.items()},
    }


def _newest_of_each_step(lines: Iterable[Any]) -> _Steps:
    found = {line.step: line for line in lines}
    return dict(sorted(found.items()))


def _evaluations(files: RunFiles) -> _Evaluations:
    found = {event.step: event for event in files.events() if event.event == "Evaluated"}
    return {
        step: numbers_of_evaluation(
            Evaluated(
                step=step, loss=e.loss, seconds=0.0, by_source=e.by_source, accuracy=e.accuracy
            )
        )
        for step, e in sorted(found.items())
    }


def _measured(rows: Sequence[RunRow], steps: Sequence[_Steps]) -> list[Values]:
    def median(field: str) -> tuple[float | None, ...]:
        known = [
            [value for line in one.values() if (value := getattr(line, field)) is not None]
            for one in steps
        ]
        return tuple(statistics.median(values) if values else None for values in known)

    def of_rows(field: str) -> tuple[Any, ...]:
        return tuple(getattr(row, field) for row in rows)

    medians = {name: median(name) for name in ("tokens_per_s", "step_s", "mfu")}
    names = (
        *("state", "layout", "exactness", "step", "loss", "eval_loss", "best_eval_loss"),
        *("tokens_per_s", "step_s", "planned_step_s", "mfu", "memory_bytes"),
        *("planned_memory_bytes", "ran_s", "usd", "restarts", "steps_lost", "downtime_s"),
    )
    found = [Values(name=name, values=medians.get(name) or of_rows(name)) for name in names]
    return [one for one in found if any(value is not None for value in one.values)]


def _curves(
    steps: Sequence[_Steps], evaluations: Sequence[_Evaluations], points: int
) -> Iterable[Curve]:
    """Every metric of the table, then what the programs logged."""
    for field, name in FIELDS.items():
        columns = [{n: getattr(line, field) for n, line in one.items()} for one in steps]
        yield from _curve(name, columns, points)
    of_programs = [{n: line.logged for n, line in one.items() if line.logged} for one in steps]
    for found in (evaluations, of_programs):
        for name in dict.fromkeys(name for one in found for line in one.values() for name in line):
            columns = [{n: line.get(name) for n, line in one.items()} for one in found]
            yield from _curve(name, columns, points)


def _curve(
    name: str, columns: Sequence[Mapping[int, float | None]], points: int
) -> Iterable[Curve]:
    """A curve of each column over the same stretches; nothing where no run has a number."""
    known = [{n: v for n, v in column.items() if v is not None} for column in columns]
    every = [number for column in known for number in column]
    if not every:
        return
    first, span = min(every), max(every) - min(every) + 1
    count = min(points, span)
    stretches: list[list[list[float]]] = [[[] for _ in range(count)] for _ in known]
    for column, stretch in zip(known, stretches, strict=True):
        for number, value in column.items():
            stretch[(number - first) * count // span].append(value)
    filled = [i for i in range(count) if any(stretch[i] for stretch in stretches)]
    chosen = [[stretch[i] for i in filled] for stretch in stretches]
    yield Curve(
        name=name,
        steps=[first + -(-(i + 1) * span // count) - 1 for i in filled],
        mean=[[statistics.fmean(part) if part else None for part in run] for run in chosen],
        low=[[min(part, default=None) for part in run] for run in chosen],
        high=[[max(part, default=None) for part in run] for run in chosen],
    )


def _bits(first: tuple[RunRow, _Steps], other: tuple[RunRow, _Steps]) -> Bits:
    (row, lines), (other_row, other_lines) = first, other
    shared = [(lines[n], other_lines[n]) for n in lines if n in other_lines]
    losses = [
        (a.step, a.loss, b.loss) for a, b in shared if a.loss is not None and b.loss is not None
    ]
    digests = [(a.step, a.state_digest, b.state_digest) for a, b in shared]
    if row.step == other_row.step:
        digests.append((row.step, row.state_digest, other_row.state_digest))
    return Bits(
        run=other_row.run,
        samples=_sameness((a.step, a.samples_digest, b.samples_digest) for a, b in shared),
        losses=_sameness(losses),
        state=_sameness(digests),
        largest_loss_difference=max(
            (abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for _, a, b in losses),
            default=None,
        ),
    )


def _sameness(pairs: Iterable[tuple[int, Any, Any]]) -> Sameness:
    """Whether both values of each step are the same; what one run did not record does not count."""
    known = [(step, a == b) for step, a, b in pairs if a not in (None, "") and b not in (None, "")]
    return Sameness(
        num_steps=len({step for step, _ in known}),
        first_difference=next((step for step, is_same in known if not is_same), None),
    )
