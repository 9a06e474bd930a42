"""A step cut into stretches: one for every block in every pass, and one for what is between.

A stretch says how memory moves inside it, relative to its beginning, and what it computes and
sends. So a stretch of one block stands for that of any other block like it, wherever it comes.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.prove.collectives import Issued
from paceline.prove.places import Place
from paceline.prove.trace import (
    ALLOC,
    ARRIVE,
    FREE,
    ISSUE,
    OP,
    PLACE,
    READ,
    WAIT,
    Operation,
    Stream,
    Trace,
)

Parts = dict[str, float]


class Compute(NamedTuple):
    """Kernels one after another, and the seconds that Python holds the host besides."""

    seconds: float
    num_kernels: float
    stream: Stream
    host_s: float = 0.0


class Issue(NamedTuple):
    """A collective is handed to its group's stream."""

    what: Issued


class Wait(NamedTuple):
    """Compute waits for a collective: the one issued so many collectives before."""

    back: int
    kind: str


class Read(NamedTuple):
    """The host waits for all kernels so far, and reads what they gave."""


class Arrive(NamedTuple):
    """Kernels wait for copies from the host."""


Work = Compute | Issue | Wait | Read | Arrive


@dataclass(slots=True)
class Segment:
    """One stretch of a step."""

    place: Place
    """Place of the segment's first operation."""

    delta: Parts
    """Part -> bytes more at its end than at its beginning."""

    peak: float
    """Most bytes in all above the beginning; 0 when it never rises."""

    peak_parts: Parts
    """Part -> bytes above the beginning at that instant."""

    peak_module: str
    work: list[Work] = field(default_factory=list)
    flops: dict[str, float] = field(default_factory=dict)
    """Module -> FLOPs."""

    @property
    def key(self) -> tuple[str, int, int, int | None]:
        """Pass and block."""
        return (self.place.phase, self.place.micro_batch, self.place.chunk, self.place.block)


@dataclass(slots=True)
class Step:
    """All of one rank's step."""

    resting: Parts
    """Part -> bytes before it begins."""

    segments: list[Segment]


def cut(trace: Trace, seconds_of: Callable[[Operation], float]) -> Step:
    """The counted step of a trace, after `parts.classify`, with what comes again in its place."""
    seconds = [seconds_of(each) for each in trace.operations]
    segments: list[Segment] = []
    issues = _Issues()
    start, place = trace.start, None
    for play in trace.plays:
        if play.result is not None:
            trace.parts[play.result] = play.passage.result_part
    for play in trace.plays:
        made, place = _cut(trace, start, play.at, place, seconds, issues)
        again = play.segments()
        segments += [*made, *again]
        issues.count += sum(isinstance(work, Issue) for each in again for work in each.work)
        start = play.at
        place = again[-1].place._replace(module="", block=None) if again else place
    made, _ = _cut(trace, start, len(trace.events), place, seconds, issues)
    return Step(_resting(trace), segments + made)


def cut_between(
    trace: Trace,
    start: int,
    end: int,
    seconds_of: Callable[[Operation], float],
    *,
    outside: Collection[int],
) -> list[Segment]:
    """Stretches of a part of a trace; storages from `outside` are not freed in it."""
    seconds = [seconds_of(each) for each in trace.operations]
    place = None
    if not any(kind == PLACE for kind, _, _ in trace.events[start:end]):
        before = (which for kind, which, _ in reversed(trace.events[:start]) if kind == PLACE)
        place = trace.places[next(before)]
    return _cut(trace, start, end, place, seconds, _Issues(), outside)[0]


@dataclass(slots=True)
class _Issues:
    """Collectives so far."""

    count: int = 0
    place_of: dict[int, int] = field(default_factory=dict)


def _resting(trace: Trace) -> Parts:
    total: Counter[str] = Counter()
    for kind, storage, size in trace.events[: trace.start]:
        if kind == ALLOC:
            total[trace.parts[storage]] += size
        elif kind == FREE and storage not in trace.played:
            total[trace.parts[storage]] -= size
    return {part: size for part, size in total.items() if size}


def _cut(
    trace: Trace,
    start: int,
    end: int,
    place: Place | None,
    seconds: Sequence[float],
    issues: _Issues,
    outside: Collection[int] = (),
) -> tuple[list[Segment], Place | None]:
    """Stretches between two events, and the place at the second of them."""
    segments = []
    for first, last, where in _stretches(trace, start, end, place):
        segments.append(_segment(trace, first, last, where, seconds, issues, outside))
        place = where
    return segments, place


def _stretches(
    trace: Trace, start: int, end: int, place: Place | None
) -> Iterator[tuple[int, int, Place]]:
    """First and last event of each stretch, and its place."""
    for index in range(start, end):
        kind, which, _ = trace.events[index]
        if kind != PLACE:
            continue
        new = trace.places[which]
        if place is not None and (new[:3], new.block) != (place[:3], place.block):
            if index > start:
                yield start, index, place
            start = index
            place = new
        place = place or new
    if place is not None and end > start:
        yield start, end, place


def _segment(
    trace: Trace,
    start: int,
    end: int,
    place: Place,
    seconds: Sequence[float],
    issues: _Issues,
    outside: Collection[int],
) -> Segment:
    now: Counter[str] = Counter()
    level = peak = 0.0
    peak_parts: Parts = {}
    peak_module = module = place.module
    flops: Counter[str] = Counter()
    work: list[Work] = []
    for kind, which, size in trace.events[start:end]:
        if kind == ALLOC:
            now[trace.parts[which]] += size
            level += size
            if level > peak:
                peak, peak_parts, peak_module = level, dict(now), module
        elif kind == FREE:
            if which not in outside:
                now[trace.parts[which]] -= size
                level -= size
        elif kind == OP:
            operation = trace.operations[which]
            flops[module] += operation.flops
            _add_compute(work, seconds[which], operation)
        elif kind == PLACE:
            module = trace.places[which].module
        elif kind == ISSUE:
            issues.place_of[which] = issues.count
            issues.count += 1
            work.append(Issue(trace.collectives[which]))
        elif kind == READ:
            work.append(Read())
        elif kind == ARRIVE:
            work.append(Arrive())
        elif kind == WAIT and which in issues.place_of:
            back = issues.count - issues.place_of[which]
            work.append(Wait(back, trace.collectives[which].kind))
    return Segment(
        place=place,
        delta={part: size for part, size in now.items() if size},
        peak=peak,
        peak_parts=peak_parts,
        peak_module=peak_module,
        work=work,
        flops={name: float(count) for name, count in flops.items() if count},
    )


def _add_compute(work: list[Work], seconds: float, what: Operation) -> None:
    more = Compute(seconds, float(what.host_s == 0), what.stream, what.host_s)
    last = work[-1] if work else None
    if isinstance(last, Compute) and last.stream == what.stream:
        work[-1] = sum_compute((last, more))
    else:
        work.append(more)


def sum_compute(work: Iterable[Compute]) -> Compute:
    """All of them in one piece."""
    seconds, kernels, streams, host_s = zip(*work, strict=True)
    return Compute(sum(seconds), sum(kernels), streams[0], sum(host_s))


class Peak(NamedTuple):
    """The peak of a step."""

    num_bytes: float
    parts: Parts
    segment: Segment


def find_peak(step: Step) -> Peak:
    """Walk the stretches and find the highest instant."""
    level = Counter(step.resting)
    total = float(sum(level.values()))
    best = Peak(-1.0, {}, step.segments[0])
    for segment in step.segments:
        if total + segment.peak > best.num_bytes:
            parts = Counter(level)
            parts.update(segment.peak_parts)
            best = Peak(total + segment.peak, dict(parts), segment)
        level.update(segment.delta)
        total += sum(segment.delta.values())
    return best


def levels(step: Step) -> Iterator[tuple[Segment, float]]:
    """Every stretch and its peak in bytes."""
    total = float(sum(step.resting.values()))
    for segment in step.segments:
        yield segment, total + segment.peak
        total += sum(segment.delta.values())
