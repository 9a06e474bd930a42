"""Ranks that compute slower than their peers, or whose losses are others, named by robust
statistics. Pure.

What is compared is the time of a step that a rank did not spend waiting for others: all ranks
finish a step together, so the whole time of a step tells nothing. Each rank is compared with the
median of its peers, those that do the same work; the ratio's median over some steps is its factor.
It is named when the factor is worth naming and far outside of what the noise of the same steps
makes of a rank that is not slow. False alarms are measured: benchmarks/straggler_false_alarms.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

WINDOWS = (16, 32, 64)
"""Steps over which a rank is judged; longer ones find what the noise of few steps hides. The first
and `EVERY` are why a rank 1.5 times as slow is named within 20 steps."""

EVERY = 4
"""Steps between two judgements."""

LEAST_FACTORS = (1.3, 1.25, 1.2)
"""For each window. Below the last nobody is named, as the run loses less than a sixth of its speed;
in few steps it takes more, as a rank that is slow for a moment is no slow rank. Guesses."""

LEAST_Z = 5.0
"""How many standard errors of its median the factor's logarithm must lie above none. Measured, see
above: with 4 there are false alarms in normal noise, with 6 a factor of 1.5 takes too long."""

LEAST_SLOW_SHARE = 0.8
"""Share of the steps in which the rank must be slower than its peers' median by half the factor:
what happens in fewer is something that happens now and then, not a slow rank."""

LEAST_ERROR = 0.01
"""No standard error is believed below one percent."""

MOST_ALIKE = 0.95
"""Largest correlation of successive steps that is reckoned with; at 1 nothing could be said."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than those that do the same work."""

    rank: int
    factor: float
    """Its time over its peers' median, median over the steps."""

    num_steps: int
    """Steps it was judged by."""


class Stragglers:
    """The recent own times of all ranks. Memory: 64 numbers for each rank."""

    def __init__(self, peers: Sequence[Sequence[int]], *, with_itself: bool = False) -> None:
        """Args:
        peers: Groups of ranks that do the same work; one alone in its group is never named.
        with_itself: Whether a rank is compared with the median of the whole group: then one that
            is off does not make two others look off to the other side.
        """
        self._with_itself = with_itself
        self._peers = [np.array(group) for group in peers if len(group) > 1]
        num_ranks = 1 + max((int(group.max()) for group in self._peers), default=-1)
        self._logs = np.full((WINDOWS[-1], num_ranks), np.nan)
        self._num_steps = 0
        self._named: frozenset[int] = frozenset()

    def add(self, own_s: Sequence[float]) -> list[Straggler]:
        """Take one step's times in rank order, in seconds; returns who is named now for the first
        time, or again after it had caught up."""
        if not self._peers:
            return []
        times = np.asarray(own_s, dtype=float)
        row = self._logs[self._num_steps % WINDOWS[-1]]
        for group in self._peers:
            row[group] = log_ratios(times[group], with_itself=self._with_itself)
        self._num_steps += 1
        if self._num_steps % EVERY:
            return []
        found: dict[int, Straggler] = {}
        for window, least in zip(WINDOWS, LEAST_FACTORS, strict=True):
            if window <= self._num_steps:
                found = {one.rank: one for one in self._judge(window, least)} | found
        new = [one for rank, one in sorted(found.items()) if rank not in self._named]
        # Once named it stays so until it is well below the bar: a rank on the brink is one finding.
        still = {
            rank for rank in self._named if self._recent_factor(rank) > LEAST_FACTORS[-1] ** 0.5
        }
        self._named = frozenset(still | set(found))
        return new

    def forget(self) -> None:
        """Begin anew: other processes have taken the ranks."""
        self._logs[:] = np.nan
        self._num_steps, self._named = 0, frozenset()

    def _judge(self, window: int, least_factor: float) -> list[Straggler]:
        logs = self._newest(window)
        history = self._newest(min(self._num_steps, WINDOWS[-1]))
        factors = np.median(logs, axis=0)
        found: list[Straggler] = []
        for group in self._peers:
            # Noise of one rank around its own median, in the same steps, of all peers together.
            noise = 1.4826 * np.median(np.abs(logs[:, group] - factors[group]))
            alike = likeness(logs[:, group])
            if len(group) > 2:  # most ranks are not slow, so what was before tells of noise only
                alike = max(alike, likeness(history[:, group]))
            error = 1.2533 * float(noise) * ((1 + alike) / (1 - alike) / window) ** 0.5
            bar = max(np.log(least_factor), LEAST_Z * max(LEAST_ERROR, error))
            found += [
                Straggler(int(rank), float(np.exp(factors[rank])), window)
                for rank in group[factors[group] > bar]
                if np.mean(logs[:, rank] > factors[rank] / 2) >= LEAST_SLOW_SHARE
            ]
        return found

    def _recent_factor(self, rank: int) -> float:
        return float(np.exp(np.median(self._newest(WINDOWS[0])[:, rank])))

    def _newest(self, window: int) -> NDArray[np.float64]:
        rows = np.arange(self._num_steps - window, self._num_steps) % WINDOWS[-1]
        return self._logs[rows]


class LossOutliers:
    """The recent mean losses of all ranks over their own samples.

    Ranks of a group draw their samples from the same data and have the same weights, so their
    losses differ by chance alone. One whose losses stay higher or lower reads other data, such as
    the same samples again, or computes with other weights.
    """

    def __init__(self, peers: Sequence[Sequence[int]], losses: Sequence[float | None]) -> None:
        """Args:
        peers: Groups of ranks that do the same work. Of two nobody can say which one is off.
        losses: Of one step. A rank without one, such as a pipeline's first stage, never has one.
        """
        groups = [[rank for rank in group if losses[rank] is not None] for group in peers]
        groups = [group for group in groups if len(group) > 2]
        self._ranks = [rank for group in groups for rank in group]
        self._high, self._low = (Stragglers(groups, with_itself=True) for _ in range(2))

    def add(self, losses: Sequence[float | None]) -> list[Straggler]:
        """Take one step's losses in rank order; returns who is named now, with its factor: above 1
        for higher losses, below 1 for lower ones. Steps with a loss that is not above 0 are not
        compared."""
        taken = np.array([np.nan if loss is None else loss for loss in losses], dtype=float)
        if not self._ranks or not np.all(
            np.isfinite(taken[self._ranks]) & (taken[self._ranks] > 0)
        ):
            return []
        taken[np.isnan(taken)] = 1.0
        lower = [replace(one, factor=1 / one.factor) for one in self._low.add((1 / taken).tolist())]
        return self._high.add(taken.tolist()) + lower


def log_ratios(times: NDArray[np.float64], *, with_itself: bool = False) -> NDArray[np.float64]:
    """Natural logarithm of each time over the median of the others, or of all.

    >>> np.exp(log_ratios(np.array([1.0, 1.0, 1.5]))).round(2).tolist()
    [0.82, 0.82, 1.5]
    """
    logs = np.log(np.maximum(times, 1e-9))
    if with_itself:
        around: NDArray[np.float64] = logs - np.median(logs)
        return around
    order = np.argsort(logs, kind="stable")
    ranked, count = logs[order], len(logs)
    place = np.empty(count, dtype=int)
    place[order] = np.arange(count)
    # The others' sorted list is `ranked` without one: its middle shifts by one past that place.
    low, high = (count - 2) // 2, (count - 1) // 2

    def at(index: int) -> NDArray[np.float64]:
        return ranked[np.where(place <= index, min(index + 1, count - 1), index)]

    ratios: NDArray[np.float64] = logs - (at(low) + at(high)) / 2
    return ratios


def likeness(logs: NDArray[np.float64]) -> float:
    """How much a step's noise is like the one before: the correlation, median over the ranks, from
    0 to `MOST_ALIKE`. What is alike averages out as slowly as that of fewer steps.

    >>> likeness(np.array([[1.0], [-1.0], [1.0], [-1.0]]))
    0.0
    """
    off = logs - np.median(logs, axis=0)
    spread = np.sum(off * off, axis=0)
    with np.errstate(invalid="ignore"):
        each = np.where(spread > 0, np.sum(off[1:] * off[:-1], axis=0) / spread, 0.0)
    return float(np.clip(np.median(each), 0.0, MOST_ALIKE))


def worth_evicting(
    factor: float, *, step_s: float, steps_left: int, eviction_s: float, num_spares: int
) -> bool:
    """Whether replacing a straggler pays: there is a spare, and the run gains more than it costs.

    All ranks wait for the slowest, so without it a step takes `step_s / factor`.

    Args:
        factor: How much slower it is than its peers.
        eviction_s: What a recovery takes, from the fence to the next step.

    >>> worth_evicting(1.5, step_s=0.3, steps_left=100, eviction_s=1.0, num_spares=1)
    True
    >>> worth_evicting(1.5, step_s=0.3, steps_left=10, eviction_s=1.0, num_spares=1)
    False
    """
    gain_s = steps_left * step_s * (1 - 1 / factor)
    return num_spares > 0 and gain_s > SURELY_WORTH * eviction_s


SURELY_WORTH = 2.0
"""The gain must be this many times the cost, as the straggler may recover by itself. A guess."""
