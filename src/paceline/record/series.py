"""A run's steps as columns of numbers, and columns short enough to draw.

Leaves out: reading files (`follow.py`), and what is drawn (`report/curves.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.record.follow import rising
from paceline.record.metric_names import FIELDS
from paceline.record.metrics import StepMetrics

Column = NDArray[np.float64]

_ALWAYS = {"step": "step", "at": "at", "generation": "generation"}

_MOST_LOGGED = 64
"""Names of a program's own that are kept. A guess: more are noise, and each costs memory."""


class Line(msgspec.Struct):
    """The fields of a line of metrics that are drawn: fewer decode faster."""

    step: int
    at: float
    generation: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    accuracy: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    mfu: float | None = None
    memory_bytes: float | None = None
    reserved_bytes: float | None = None
    num_steps: int | None = None
    logged: dict[str, float | None] = {}


COLUMNS = {name: field for field, name in FIELDS.items() if field in Line.__struct_fields__}
"""Name of a metric -> field of a line."""


class Series:
    """The newest line of every step, in step order. NaN is what was not measured."""

    def __init__(self) -> None:
        self._columns = {name: np.empty(0) for name in (*_ALWAYS, *COLUMNS)}
        self.logged: list[str] = []
        """Names that the program logged, in the order they appeared."""

        self.num_steps: int | None = None
        """Steps there will be, as the newest line says; a script's own lines say so."""

        self.num = 0
        self.cuts: list[int] = []
        """For each time the run went back, the row from which on rows were replaced."""

    def take(self, lines: Sequence[Line | StepMetrics]) -> None:
        """Add lines in the order written; a step that is repeated replaces its row and later."""
        for stretch in rising(lines):
            self._append(stretch)

    def column(self, name: str) -> Column:
        """One column of `COLUMNS`, `logged`, or `step`, `at`, `generation`."""
        return self._columns[name][: self.num]

    def newest(self, name: str) -> float | None:
        """The last value that was measured."""
        known = self.column(name)
        known = known[np.isfinite(known)]
        return float(known[-1]) if len(known) else None

    def _append(self, stretch: Sequence[Line | StepMetrics]) -> None:
        first = stretch[0].step
        self.num_steps = stretch[-1].num_steps
        if self.num and first <= self.column("step")[-1]:
            self.num = int(np.searchsorted(self.column("step"), first))
            self.cuts.append(self.num)
        end = self.num + len(stretch)
        self._note_names(stretch)
        self._make_room(end)
        rows = slice(self.num, end)
        for name, field in (*_ALWAYS.items(), *COLUMNS.items()):
            values = [getattr(line, field) for line in stretch]
            self._columns[name][rows] = np.array(values, dtype=float)  # None becomes NaN
        for name in self.logged:
            values = [line.logged.get(name) for line in stretch]
            self._columns[name][rows] = np.array(values, dtype=float)
        self.num = end

    def _note_names(self, stretch: Sequence[Line | StepMetrics]) -> None:
        for line in stretch:
            for name in line.logged:
                if name not in self._columns and len(self.logged) < _MOST_LOGGED:
                    self.logged.append(name)
                    self._columns[name] = np.full(len(self._columns["step"]), np.nan)

    def _make_room(self, num: int) -> None:
        have = len(self._columns["step"])
        if num > have:
            more = np.full(max(num, 2 * have, 1024) - have, np.nan)
            self._columns = {
                name: np.concatenate([column, more]) for name, column in self._columns.items()
            }


@dataclass(frozen=True, slots=True)
class Thin:
    """A column in at most so many stretches: no spike is lost, whatever the zoom."""

    mean: Column
    low: Column
    high: Column


def thinned(columns: Sequence[Column], most: int) -> list[Thin]:
    """Mean, smallest and largest value of each of `most` stretches of equally long columns.

    NaN has no weight; a stretch without a number is NaN. Columns that are not longer come as they
    are.
    """
    if not columns or len(columns[0]) <= most:
        return [Thin(column, column, column) for column in columns]
    starts = np.linspace(0, len(columns[0]), most + 1).astype(int)[:-1]
    return [_thin(column, starts) for column in columns]


def _thin(column: Column, starts: NDArray[np.int_]) -> Thin:
    known = np.isfinite(column)
    count = np.add.reduceat(known.astype(float), starts)
    none = count == 0
    total = np.add.reduceat(np.where(known, column, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, column, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, column, -np.inf), starts)
    mean = total / np.where(none, 1.0, count)
    return Thin(*(np.where(none, np.nan, values) for values in (mean, low, high)))
