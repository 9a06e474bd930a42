"""A run's record in the order of its clock: its parts, its failures, the work that was lost.

Leaves out: how long each kind of work took (`time_account.py`) and drawing (`plots.py`).
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.metrics import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """From the controller taking charge to the end, or to the last that is known."""

    start: float
    end: float
    """Seconds since 1970 (UTC), never before `start`."""

    finished: log.RunFinished | None
    """None when the part goes on, or its controller died."""

    events: tuple[log.AnyEvent, ...]
    metrics: tuple[StepMetrics, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One loss of a worker, and what came of it."""

    lost: log.WorkerLost
    """The cause: where a signal was found to be behind the first sign, the signal."""

    step: int
    """The step that was under way."""

    is_drill: bool
    """Whether the job asked for it."""

    recovered: log.Recovered | None
    """None when the run had not recovered from it, or failed once more on the way."""

    changed: str = ""
    """What is other in the layout that the run resumed in, where it was out of memory:
    `layout.micro_batch 8 to 4`."""


@dataclass(frozen=True, slots=True)
class RunningClock:
    """Seconds that a run has been running, without the time between its parts."""

    parts: tuple[Part, ...]

    def __call__(self, at: float) -> float:
        """Seconds of running until a time (seconds since 1970); 0 before the start."""
        return sum(max(0.0, min(at, part.end) - part.start) for part in self.parts)


def parts(record: RunRecord) -> tuple[Part, ...]:
    """Every time the controller took charge, in order; none in a run that never started."""
    return parts_of(record.events, record.metrics)


def parts_of(every: Sequence[log.AnyEvent], metrics: Sequence[StepMetrics]) -> tuple[Part, ...]:
    """Every time the controller took charge, from events and lines in the order they were
    written."""
    begins = [i for i, event in enumerate(every) if isinstance(event, log.RunStarted)]
    lines_at = [line.at for line in metrics]
    found = []
    for first, last in pairwise([*begins, len(every)]):
        events = every[first:last]
        start = events[0].at
        is_last = last == len(every)
        until = float("inf") if is_last else every[last].at
        # The lines are in the order of the clock, but for a clock that was set back.
        lines = metrics[_before(lines_at, start) : _before(lines_at, until)]
        finished = next((e for e in events if isinstance(e, log.RunFinished)), None)
        known = [event.at for event in events] + [line.at for line in lines[-1:]]
        end = finished.at if finished is not None else max(known)
        found.append(
            Part(
                start=start,
                end=max(start, min(end, until)),
                finished=finished,
                events=tuple(events),
                metrics=tuple(lines),
            )
        )
    return tuple(found)


def failures(part: Part) -> list[Failure]:
    """Every failure of a part, in order: one for each set of workers that was lost."""
    recovered = {e.generation - 1: e for e in part.events if isinstance(e, log.Recovered)}
    drilled = {e.generation for e in part.events if isinstance(e, log.FaultInjected)}
    lost: dict[int, log.WorkerLost] = {}
    for event in part.events:
        if isinstance(event, log.WorkerLost):
            lost[event.generation] = event
    found: list[Failure] = []
    furthest = 0
    for generation, event in lost.items():
        furthest = max(furthest, event.last_step)
        found.append(
            Failure(
                lost=event,
                step=furthest + 1,
                is_drill=generation in drilled,
                recovered=recovered.get(generation),
            )
        )
        if generation in recovered:
            furthest = 0
    return found


def all_failures(every: Sequence[Part]) -> list[tuple[Part, Failure]]:
    """Every failure with its part, in order. One of memory, after which the run resumed in another
    layout, has its recovery in the part after it."""
    found = []
    for index, part in enumerate(every):
        broken = failures(part)
        plan = next((e for e in part.events if isinstance(e, log.PlanChanged)), None)
        if plan is not None and broken:
            after = every[index + 1].events if index + 1 < len(every) else ()
            back = [e for e in after if isinstance(e, log.Recovered)]
            next_one = broken[-1].lost.generation + 1
            broken[-1] = replace(
                broken[-1],
                recovered=next((e for e in back if e.generation == next_one), None),
                changed=", ".join(_change(part, setting) for setting in plan.settings),
            )
        found += [(part, failure) for failure in broken]
    return found


def _change(part: Part, setting: str) -> str:
    name, _, value = setting.partition("=")
    start = part.events[0]
    before = start.arithmetic.get(name) if isinstance(start, log.RunStarted) else None
    return setting if before is None else f"{name} {before} to {value}"


def is_lost(record: RunRecord) -> list[bool]:
    """For each metrics line, whether the step had to be repeated later, or still has to be.

    A step is lost when the workers later went back to before it.
    """
    restarts = [(e.at, e.first_step) for e in record.events if isinstance(e, log.TrainingStarted)]
    back_to = _lowest_after(restarts)
    starts = [at for at, _ in restarts]
    lost = []
    lowest = float("inf")
    for line in reversed(record.metrics):
        later = back_to[bisect_right(starts, line.at)]
        lost.append(lowest <= line.step or later <= line.step)
        lowest = min(lowest, line.step)
    return lost[::-1]


class HasEvents(Protocol):
    """A run's record, or a view of a run."""

    @property
    def events(self) -> Sequence[log.AnyEvent]:
        """In the order they were written."""

    @property
    def is_running(self) -> bool:
        """Whether a process holds the run now."""


def outcome(run: HasEvents) -> str:
    """`finished`, `interrupted`, `failed`, `running`, `crashed` (its controller died) or `new`."""
    turns = [e for e in run.events if isinstance(e, log.RunStarted | log.RunFinished)]
    if turns and isinstance(turns[-1], log.RunFinished):
        return turns[-1].outcome
    if run.is_running:
        return "running"
    return "crashed" if turns else "new"


def _lowest_after(restarts: Iterable[tuple[float, int]]) -> list[float]:
    """Entry i: the lowest first step from the i-th start on; infinity after the last."""
    lowest = [float("inf")]
    for _, first_step in reversed(list(restarts)):
        lowest.append(min(lowest[-1], first_step))
    return lowest[::-1]


def _before(times: Sequence[float], limit: float) -> int:
    return bisect_right(times, limit)
