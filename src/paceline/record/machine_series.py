"""Samples of a run's machines as columns over time, for drawing: what is usual, and the extremes.

Leaves out: reading files (`follow.py`, `machines.py`).
"""

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

import numpy as np

from paceline.record.machines import MachineSample, RankSample, numbers_of_machine
from paceline.record.series import Column, Thin


class MachineSeries:
    """Mean, smallest and largest value of each node's GPUs, or of the node, by time."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        self.num = 0
        self._ranks: dict[int, tuple[float, RankSample]] = {}

    def take(self, samples: Iterable[MachineSample]) -> None:
        for sample in samples:
            self.num += 1
            self._ranks.update({each.rank: (sample.at, each) for each in sample.ranks})
            by_name: dict[str, list[float]] = defaultdict(list)
            for name, _, value in numbers_of_machine(sample):
                by_name[name].append(value)
            for name, values in by_name.items():
                self._rows[name].append((sample.at, fmean(values), min(values), max(values)))

    @property
    def names(self) -> list[str]:
        """Metrics that some machine had a value of."""
        return list(self._rows)

    def ranks_since(self, at: float) -> list[RankSample]:
        """Where ranks were when they were last seen; without those not seen since then."""
        return [each for seen_at, each in self._ranks.values() if seen_at >= at]

    def binned(self, most: int) -> tuple[Column, dict[str, Thin]]:
        """Times, and each metric at them: over all nodes and GPUs, `most` points at most."""
        if not self._rows:
            return np.empty(0), {}
        columns = {name: np.array(rows) for name, rows in self._rows.items()}
        every = np.unique(np.concatenate([rows[:, 0] for rows in columns.values()]))
        ends = every if len(every) <= most else np.linspace(every[0], every[-1], most + 1)[1:]
        return ends, {name: _binned(rows, ends) for name, rows in columns.items()}


def _binned(rows: Column, ends: Column) -> Thin:
    """Rows of time, mean, low and high, gathered at the first end that is not before them."""
    places = np.searchsorted(ends, rows[:, 0])
    count = np.bincount(places, minlength=len(ends)).astype(float)
    total = np.bincount(places, weights=rows[:, 1], minlength=len(ends))
    low, high = np.full(len(ends), np.inf), np.full(len(ends), -np.inf)
    np.minimum.at(low, places, rows[:, 2])
    np.maximum.at(high, places, rows[:, 3])
    none = count == 0
    mean = total / np.where(none, 1.0, count)
    return Thin(*(np.where(none, np.nan, values) for values in (mean, low, high)))
