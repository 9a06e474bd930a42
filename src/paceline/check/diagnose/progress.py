"""How far a run came by the last lines of its logs, and whether its end is in them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from paceline import units
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.line import Line, read_line, with_rank
from paceline.check.diagnose.messages import spans
from paceline.check.diagnose.seen import Seen, Source
from paceline.launch import script_lines

_PATIENCE = 20
"""Usual times between two printed steps after which a run that still prints other lines stands.
A guess: a checkpoint or an evaluation takes less."""

_LEAST_S = 120.0
"""Seconds that must pass at least: a first save, a compilation."""

_MAX_SOURCES = 256
_ENDED = re.compile(read_shipped("precedence.toml")["ended"]["log"])


@dataclass(frozen=True, slots=True)
class _Step:
    line: Line
    step: int
    is_last: bool
    """Whether it is the last of all steps, as the line says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stood when its logs end, and they do not show that it ended."""

    line: Line
    """The last one of training."""

    what: str
    """In words."""

    behind: Sequence[int]
    """Ranks whose steps end before those of the others."""

    has_stopped: bool
    """Whether other lines came for long after it."""


def ranks_at_the_end(seen: Seen) -> set[int]:
    """Ranks that the last lines are from, and those that logs are named after."""
    lines = (line for source in seen.sources[:_MAX_SOURCES] for line in _last_lines(source))
    return {line.rank for line in lines if line.rank is not None}


def open_end(seen: Seen) -> Progress | None:
    """Where the run stood; None where its end is seen, or no steps are."""
    steps: list[_Step] = []
    last: Line | None = None
    for source in seen.sources[:_MAX_SOURCES]:
        step = None
        for line in _last_lines(source):
            if _ENDED.search(line.raw):
                return None
            last, step = line, _step(line) or step
            if step is not None and step.line is line:
                steps.append(step)
        if step is not None and step.is_last:
            return None
    if last is None or not steps:
        return None
    furthest = max(steps, key=lambda each: each.step)
    what = f"progress stopped at step {furthest.step:,}{_at(furthest.line.time_s)}"
    behind = _behind(steps)
    for end, ranks in behind.items():
        what += f"; rank {spans(ranks)} prints none after step {end:,}"
    waited_s = _waited_s(steps, last)
    if waited_s is not None:
        what += f", and other lines came for {units.format_seconds(waited_s)} after it"
    return Progress(
        line=furthest.line,
        what=what,
        behind=sorted(rank for ranks in behind.values() for rank in ranks),
        has_stopped=waited_s is not None,
    )


def _at(time_s: float | None) -> str:
    """` at 12:00:30`, as the line gives it; nothing where it gives no time.

    >>> _at(12 * 3600 + 30.5)
    ' at 12:00:30'
    """
    if time_s is None:
        return ""
    minutes, seconds = divmod(int(time_s % 86_400), 60)
    return f" at {minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def _last_lines(source: Source) -> Iterator[Line]:
    texts = source.tail.split("\n")
    first = source.num_lines - source.tail.count("\n") + 1
    for number, text in enumerate(texts, start=first):
        *_, raw = text.rstrip("\r").split("\r")  # of a bar what it shows in the end
        if raw:
            line = read_line(raw, source=source.name, number=max(number, 1))
            yield with_rank(line, source.rank, source.host)


def _step(line: Line) -> _Step | None:
    told = script_lines.read_line(line.message)
    if told is None or (told.bar is not None and told.bar.is_inner):
        return None
    step, total = told.step, told.num_steps
    if told.bar is not None:
        step, total = told.bar.done, told.bar.total
    return _Step(line, step, step == total) if step is not None else None


def _behind(steps: list[_Step]) -> dict[int, list[int]]:
    """Step -> ranks that print none after it, where others print two further ones and more."""
    of_rank: dict[int, list[int]] = {}
    for each in steps:
        if each.line.rank is not None:
            of_rank.setdefault(each.line.rank, []).append(each.step)
    ends = {rank: max(printed) for rank, printed in of_rank.items()}
    furthest = max(ends.values(), default=0)
    printed = sorted({step for each in of_rank.values() for step in each})
    gap = 2 * max((b - a for a, b in pairwise(printed)), default=1)
    found: dict[int, list[int]] = {}
    for rank, end in ends.items():
        if furthest - end > gap:
            found.setdefault(end, []).append(rank)
    return found


def _waited_s(steps: list[_Step], last: Line) -> float | None:
    """Seconds in which lines came and no step, where that is far longer than steps take."""
    times = sorted({each.line.time_s for each in steps if each.line.time_s is not None})
    if len(times) < 3 or last.time_s is None:
        return None
    usual_s = median(b - a for a, b in pairwise(times))
    waited_s = last.time_s - times[-1]
    return waited_s if waited_s > max(_LEAST_S, _PATIENCE * usual_s) else None
