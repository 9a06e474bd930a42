"""A run's record as samples, one number each: what alert rules are judged by.

Pure, and in the order given. Leaves out reading the files (`follow.py`, `machines.py`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from paceline.record import events as log
from paceline.record.machines import MachineSample, numbers_of_machine
from paceline.record.metric_names import FIELDS, numbers_of, numbers_of_evaluation
from paceline.record.metrics import StepMetrics

_MAY_BE_INFINITE = ("train/loss", "train/grad_norm")
"""Metrics of a step of Paceline's runtime whose null is a number that is not finite; of the others
it is what was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number at one moment."""

    metric: str
    value: float | None
    """None is not finite."""

    at: float
    """Seconds since 1970 (UTC)."""

    of: str = ""
    """The rank, GPU or node whose it is; empty is the whole run."""

    step: int | None = None
    """The newest step then."""


_NO_NEWS = (
    log.AlertFired,
    log.AlertOver,
    log.AlertNotSent,
    log.StragglerNamed,
    log.LossOutlierNamed,
    log.Noted,
)
"""Events that are no progress."""


class Sampler:
    """Turns what a run wrote into samples."""

    def __init__(self, *, usd_per_h: float | None) -> None:
        self._usd_per_h = usd_per_h
        self._step: int | None = None
        self._moved_at: float | None = None
        """When a step, save or evaluation was last seen; None before the first step."""

        self._saved_at: float | None = None
        """When a checkpoint was last saved, or training began."""

        self._began: float | None = None
        self._last_at = 0.0
        self._ran_s = 0.0
        """Seconds of the parts of the run that are over."""

        self._first: int | None = None
        """First generation since the run was started."""

        self._restarts = 0

    def of_step(self, line: StepMetrics, now: float) -> Iterator[Sample]:
        """Samples of a step's line.

        Args:
            now: When it was read, by the clock that `of_clock` is given.
        """
        self._step, self._moved_at = line.step, now
        infinite: Collection[str] = _MAY_BE_INFINITE
        if line.not_finite is not None:  # of a script, which prints what it likes
            infinite = [FIELDS.get(field, field) for field in line.not_finite]
        for name, value in numbers_of(line).items():
            if value is not None or name in infinite or name in line.logged:
                yield self._sample(name, value, line.at)

    def of_event(self, event: log.AnyEvent, now: float) -> Iterator[Sample]:
        """Samples of an event, and one whose metric is `event NAME`."""
        if not isinstance(event, _NO_NEWS) and self._moved_at is not None:
            self._moved_at = now
        match event:
            case log.RunStarted():
                if self._began is not None:  # its controller died without a last word
                    self._ran_s += max(0.0, self._last_at - self._began)
                self._began, self._first, self._moved_at = event.at, None, None
                self._saved_at = None
            case log.TrainingStarted() | log.WorkerStarted():
                if self._saved_at is None and isinstance(event, log.TrainingStarted):
                    self._saved_at = event.at
                is_first = self._first is None
                self._first = event.generation if self._first is None else self._first
                restarts = event.generation - self._first
                if is_first or restarts > self._restarts:
                    yield self._sample("run/restarts", restarts, event.at)
                self._restarts = restarts
            case log.CheckpointSaved():
                self._saved_at = event.at
            case log.Evaluated():
                for name, value in numbers_of_evaluation(event).items():
                    yield self._sample(name, value, event.at)
            case log.RunFinished():
                self._ran_s += event.at - self._began if self._began is not None else 0.0
                self._began = self._moved_at = self._saved_at = None
        self._last_at = event.at
        of = ""
        if isinstance(rank := getattr(event, "rank", None), int):
            of = f"rank {rank}"
        elif isinstance(node := getattr(event, "node", None), int):
            of = f"node {node}"
        yield self._sample(f"event {type(event).__name__}", None, event.at, of)

    def of_machine(self, line: MachineSample) -> Iterator[Sample]:
        """Samples of a node and its GPUs."""
        for name, of, value in numbers_of_machine(line):
            yield self._sample(name, value, line.at, of)

    def of_clock(self, now: float) -> Iterator[Sample]:
        """What changes with time alone, while the run goes on."""
        if self._moved_at is not None:
            yield self._sample("run/silence_s", now - self._moved_at, now)
        if self._saved_at is not None:
            yield self._sample("run/checkpoint_age_s", now - self._saved_at, now)
        if self._usd_per_h is not None and self._began is not None:
            ran_s = self._ran_s + now - self._began
            yield self._sample("run/usd", self._usd_per_h * ran_s / 3600, now)
            yield self._sample("run/usd_per_h", self._usd_per_h, now)

    def _sample(self, metric: str, value: float | None, at: float, of: str = "") -> Sample:
        return Sample(metric=metric, value=value, at=at, of=of, step=self._step)
