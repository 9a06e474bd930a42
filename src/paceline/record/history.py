"""What a run's events add up to: its starts and ends, evaluations, recoveries, exactness.

Read from the files of any version: an event that is not known counts for nothing.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

Promise = Literal["bitwise", "numeric", "different"]

_PROMISES: Final[tuple[Promise, ...]] = ("bitwise", "numeric", "different")
"""From the most that can be promised to the least."""


class Event(msgspec.Struct):
    """The fields of all events that are counted here."""

    event: str
    at: float = 0.0
    generation: int = 0
    num_ranks: int = 0
    num_nodes: int = 0
    num_steps: int = 0
    layout: str = ""
    arithmetic: dict[str, Any] = {}
    step: int = 0
    loss: float | None = None
    by_source: dict[str, float | None] = {}
    accuracy: float | None = None
    steps_lost: int = 0
    downtime_s: float = 0.0
    outcome: str | None = None
    state_digest: str | None = None
    held_out_loss: float | None = None
    restarts: int = 0
    reason: str | None = None
    exactness: str = ""
    peak_bytes: list[int | None] = []


class History:
    """What the events add up to, in the order they happened.

    A run that is not over counts as crashed: whether a process holds it is not in its events.
    """

    def __init__(self, *, is_script: bool) -> None:
        self.is_script = is_script
        self.started_at: float | None = None
        self.seen_at = 0.0
        self.num_steps = 0
        self.num_ranks: int | None = None
        self.num_nodes: int | None = None
        self.last_step = 0
        self.eval_loss: float | None = None
        self.eval_step: int | None = None
        self.eval_losses: dict[int, float] = {}
        self.steps_lost = 0
        self.downtime_s = 0.0
        self.state_digest: str | None = None
        self.reason: str | None = None
        self.layout: str | None = None
        self.checkpoint_step: int | None = None
        self.peak_bytes: int | None = None
        self.outcome: str | None = None
        self._began_at: float | None = None
        self._closed_s = 0.0
        self._num_starts = self._num_trainings = self._counted_restarts = self._num_refits = 0
        self._attempts: set[int] = set()
        self._arithmetic: Mapping[str, Any] = {}
        self._promise: Promise = "bitwise"

    def add(self, event: Event) -> None:
        kind = event.event
        if kind == "RunStarted":
            self._start(event)
        elif kind == "RunFinished":
            self._finish(event)
        elif kind == "TrainingStarted":
            self._num_trainings += 1
        elif kind == "PlanChanged":
            self._num_refits += 1
        elif kind == "WorkerStarted":
            self._attempts.add(event.generation)
        elif kind == "Evaluated":
            self.eval_loss, self.eval_step = event.loss, event.step
            self.eval_losses.pop(event.step, None)
            if event.loss is not None:
                self.eval_losses[event.step] = event.loss
        elif kind == "Recovered":
            self.steps_lost += event.steps_lost
            self.downtime_s += event.downtime_s
        elif kind == "CheckpointSaved":
            self.checkpoint_step = event.step
        elif kind == "WorldChanged":
            self.num_ranks, self.layout = event.num_ranks, event.layout
        elif kind == "ExactnessChanged":
            self._promise_no_more_than(event.exactness)
        self.seen_at = max(self.seen_at, event.at)

    def _start(self, event: Event) -> None:
        if self._began_at is not None:  # the part before it ended without a word
            self._closed_s += max(0.0, self.seen_at - self._began_at)
        if self.difference(event.arithmetic) is not None:
            self._promise_no_more_than("numeric")
        self._arithmetic = event.arithmetic
        self.started_at = self.started_at or event.at
        self._began_at, self.outcome, self.reason, self.state_digest = event.at, None, None, None
        self._num_starts += 1
        self._attempts.clear()
        self.num_ranks, self.num_nodes = event.num_ranks, event.num_nodes
        self.num_steps, self.layout = event.num_steps, event.layout

    def _finish(self, event: Event) -> None:
        if self._began_at is not None:
            self._closed_s += max(0.0, event.at - self._began_at)
            self._began_at = None
        self.outcome, self.reason = event.outcome, event.reason
        self.state_digest, self.last_step = event.state_digest, event.step
        self._promise_no_more_than(event.exactness)
        self._counted_restarts += event.restarts
        self._attempts.clear()
        peaks = [size for size in event.peak_bytes if size is not None]
        self.peak_bytes = max(peaks, default=self.peak_bytes)
        if self.eval_step is None:
            self.eval_loss = event.held_out_loss

    @property
    def state(self) -> str:
        return self.outcome or ("new" if self.started_at is None else "crashed")

    @property
    def restarts(self) -> int:
        """How often training started again after a failure."""
        if self.is_script:
            return self._counted_restarts + max(0, len(self._attempts) - 1)
        # A resume by hand is no restart; one in another layout, for want of memory, is.
        return max(0, self._num_trainings - self._num_starts + self._num_refits)

    def ran_s(self, seen_at: float) -> float:
        """Seconds between each start and its end, or the last that was heard of it."""
        open_s = 0.0 if self._began_at is None else max(0.0, seen_at - self._began_at)
        return self._closed_s + open_s

    def difference(self, arithmetic: Mapping[str, Any]) -> str | None:
        """What a part of the run that starts so adds up in another order than the part before.

        Args:
            arithmetic: As `RunStarted` has it.

        Returns:
            Each value that differs, before and now; None where none does, or no part was before.
        """
        before = self._arithmetic
        if self.started_at is None:
            return None
        differs = [
            f"{name} was {before.get(name)} and is {arithmetic.get(name)}"
            for name in dict.fromkeys((*before, *arithmetic))
            if before.get(name) != arithmetic.get(name)
        ]
        return ", ".join(differs) or None

    def exactness(self, *, is_deterministic: bool) -> Promise | Literal["unknown"]:
        """What can be promised of the state: see `RunRow.exactness`. All that shows or records it
        of a run asks here."""
        if self.is_script or self.started_at is None:
            return "unknown"
        return "numeric" if self._promise == "bitwise" and not is_deterministic else self._promise

    def _promise_no_more_than(self, promise: str) -> None:
        known = [self._promise, *(each for each in _PROMISES if each == promise)]
        self._promise = max(known, key=_PROMISES.index)
