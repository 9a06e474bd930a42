"""Where the time went: every second a run was running, under one heading each.

The shares add up to the wall time from each start to its end by construction: every piece of
work is laid on the clock where the record says it was, nothing is laid where something lies
already, and what stays empty is named as not accounted for.

Leaves out: the time between the parts of a resumed run, and what the other ranks did (the parts
of a step are rank 0's).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.metrics import StepMetrics
from paceline.report.timeline import Part, failures, is_lost, parts

Group = Literal["training", "keeping", "recovery", "other"]

HEADINGS: tuple[tuple[str, Group, str, str], ...] = (
    ("data", "training", "Data", "waiting for the samples"),
    ("forward", "training", "Forward", "forward pass; the whole step where parts were not timed"),
    ("backward", "training", "Backward", "backward pass with the gradient reduction"),
    (
        "vote",
        "training",
        "Agreement",
        "gradient norm, is it finite on all ranks, waiting for the slowest",
    ),
    ("apply", "training", "Optimizer", "clipping and the update"),
    ("evaluate", "keeping", "Evaluation", "evaluation loss"),
    ("save", "keeping", "Checkpoints", "training stood still to save"),
    ("detect", "recovery", "Detect", "from the kill to the controller knowing"),
    ("fence", "recovery", "Fence", "until no worker of the old generation was left"),
    ("start", "recovery", "Start", "new processes, imports, meeting of the ranks"),
    ("restore", "recovery", "Restore", "model built, checkpoint verified and loaded"),
    ("first_step", "recovery", "First step", "until every rank had finished a step"),
    ("unrecovered", "recovery", "Not recovered", "after a failure that no recovery followed"),
    ("lost", "recovery", "Lost work", "steps that were repeated, and the step under way"),
    ("startup", "other", "Start-up", "processes, imports, data, model, until training started"),
    ("ending", "other", "Shutdown", "digest of the state, completion records, processes ending"),
    ("rest", "other", "Not accounted for", "between the pieces the record has times of"),
)
"""Key, group, name and meaning of every heading, in the order they are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """One heading of the account."""

    key: str
    group: Group
    name: str
    meaning: str
    seconds: float
    share: float
    """Share of the wall time, 0 to 1."""


def time_account(record: RunRecord) -> list[TimeShare]:
    """Seconds under every heading, in order; empty when the run has not run for any time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    lost_lines = {
        id(line) for line, lost in zip(record.metrics, is_lost(record), strict=True) if lost
    }
    restarts = [e for e in record.events if isinstance(e, log.TrainingStarted)]
    every = parts(record)
    for part in every:
        _account(part, lost_lines, restarts, seconds)
    total = sum(part.end - part.start for part in every)
    if total <= 0:
        return []
    return [
        TimeShare(
            key=key,
            group=group,
            name=name,
            meaning=meaning,
            seconds=seconds[key],
            share=seconds[key] / total,
        )
        for key, group, name, meaning in HEADINGS
    ]


def _account(
    part: Part,
    lost_lines: set[int],
    restarts: list[log.TrainingStarted],
    seconds: defaultdict[str, float],
) -> None:
    """Lay a part's pieces on its clock, the surest first."""
    clock = _Clock(part.end - part.start)
    before = sum(seconds.values())
    for key, start, duration in _recoveries(part):
        seconds[key] += clock.take(start, start + duration)
    for line in part.metrics:
        _lay_step(line, part.start, clock, seconds, is_lost=id(line) in lost_lines)
    for key, start, end in (*_pauses(part, restarts), *_edges(part)):
        seconds[key] += clock.take(start, end)
    laid = sum(seconds.values()) - before
    seconds["rest"] += max(0.0, part.end - part.start - laid)


def _recoveries(part: Part) -> Iterator[tuple[str, float, float]]:
    """Heading, start and duration of each recovery's phases."""
    for event in part.events:
        if isinstance(event, log.Recovered):
            start = event.at - event.downtime_s - part.start
            for key, duration in recovery_phases(event):
                yield key, start, duration
                start += duration


def recovery_phases(event: log.Recovered) -> list[tuple[str, float]]:
    """Heading and seconds of each phase, in order."""
    return [
        ("detect", event.detect_s or 0.0),
        ("fence", event.fence_s),
        ("start", event.start_s),
        ("restore", event.restore_s),
        ("first_step", event.first_step_s),
    ]


def _lay_step(
    line: StepMetrics,
    origin: float,
    clock: "_Clock",
    seconds: defaultdict[str, float],
    *,
    is_lost: bool,
) -> None:
    end = line.at - origin
    step_s = line.step_s or 0.0
    start = end - step_s
    if is_lost:
        seconds["lost"] += clock.take(start, end)
        return
    pieces = (
        ("data", line.data_s),
        ("forward", step_s if line.forward_s is None else line.forward_s),
        ("backward", line.backward_s),
        ("vote", line.vote_s),
        ("apply", line.apply_s),
    )
    for key, duration in ((key, duration) for key, duration in pieces if duration is not None):
        seconds[key] += clock.take(start, start + duration)
        start += duration


def _pauses(part: Part, restarts: list[log.TrainingStarted]) -> Iterator[tuple[str, float, float]]:
    """Evaluations and saves: heading, start, end. Those of lost steps are lost with them."""
    for event in part.events:
        end = event.at - part.start
        if isinstance(event, log.Evaluated):
            again = any(e.at > event.at and e.first_step <= event.step for e in restarts)
            yield "lost" if again else "evaluate", end - (event.seconds or 0.0), end
        elif isinstance(event, log.CheckpointSaved):
            yield "save", end - (event.stall_s or 0.0), end


def _edges(part: Part) -> Iterator[tuple[str, float, float]]:
    """What is known only by what stands before and after it: heading, start, end."""
    events, length = part.events, part.end - part.start
    trained = [e.at - part.start for e in events if isinstance(e, log.TrainingStarted)]
    broken = [failure.lost.at - part.start for failure in failures(part)]
    ready = min([*trained[:1], *broken[:1], length])
    yield "startup", 0.0, ready
    done = [line.at - part.start for line in part.metrics]
    done += [
        e.at - part.start for e in events if isinstance(e, log.Evaluated | log.CheckpointSaved)
    ]
    marks = sorted([*trained, *done])
    for failure in failures(part):
        known = failure.lost.at - part.start
        recovered = failure.recovered
        begin = known if recovered is None else recovered.at - recovered.downtime_s - part.start
        index = bisect_left(marks, begin)
        if index:
            yield "lost", marks[index - 1], begin
        if recovered is None:
            back = [e.at - part.start for e in events if isinstance(e, log.Recovered)]
            yield "unrecovered", known, min((at for at in back if at > known), default=length)
    if part.finished is not None and marks:
        yield "ending", marks[-1], length


class _Clock:
    """A stretch of time where every moment is given away once."""

    def __init__(self, length: float) -> None:
        self._length = length
        self._starts: list[float] = []
        self._ends: list[float] = []

    def take(self, start: float, end: float) -> float:
        """Take what is free between two times, and say how many seconds that was."""
        start, end = max(start, 0.0), min(end, self._length)
        if not end > start:
            return 0.0
        starts, ends = self._starts, self._ends
        first = bisect_left(ends, start)  # the first stretch that touches or follows
        last, taken = first, 0.0
        low, high = start, end
        while last < len(starts) and starts[last] <= end:
            taken += max(0.0, min(ends[last], end) - max(starts[last], start))
            low, high = min(low, starts[last]), max(high, ends[last])
            last += 1
        starts[first:last] = [low]
        ends[first:last] = [high]
        return max(0.0, end - start - taken)
