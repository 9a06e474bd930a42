"""How long collectives are in flight, and how long the rank does nothing else meanwhile.

PyTorch's profiler gives every operation's and every collective's beginning and end. On a CPU gloo's
collectives are asynchronous events, from their call until they are done; the rank computes while
one of its threads is inside an ATen operation and not inside a call of the collective library. On
an accelerator both are kernels on its streams.

What a pipeline's stage receives is apart: while it waits for a message and neither computes nor is
in another collective, it stands idle. The shortest message, sent or received, is taken for what
sending alone takes.

What it is off by: Python's time between two operations counts as not computing, so the exposed time
is an upper bound on a CPU; and the profiler makes small operations slower, which a profiled step's
time beside a timed one's shows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.record.bench import Communication

BEGIN, END = "paceline::bench_begin", "paceline::bench_end"
"""Marks in the profile around the steps that count."""

Span = tuple[float, float]
"""Beginning and end."""

_CALLS = ("c10d::", "_c10d_functional::", "_dtensor::", "c10d_functional::")
_LIBRARIES = ("gloo:", "nccl:")
_RECEIVES = ("gloo:recv", "nccl:recv")
_MESSAGES = ("gloo:recv", "gloo:send", "nccl:recv", "nccl:send")
_DEVICE_MESSAGE = "SendRecv"
"""NCCL's kernel for sends and receives. Source: nccl 2.27, src/device/sendrecv.h."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a profile; nanoseconds."""

    name: str
    start: float
    end: float
    thread: int
    is_async: bool
    on_device: bool


def communication_of(profile: Any, num_steps: int) -> Communication | None:
    """Seconds a step, from a profile with the two marks; None when it lacks them."""
    return communication_in(
        [_event(each) for each in profile.profiler.kineto_results.events()], num_steps
    )


def communication_in(events: Sequence[Event], num_steps: int) -> Communication | None:
    """The communication in these events."""
    begins = [event.end for event in events if event.name == BEGIN]
    ends = [event.start for event in events if event.name == END]
    if not begins or not ends:
        return None
    window = (begins[0], ends[-1])
    on_device = any(event.on_device for event in events)
    flights, work = (_device_spans if on_device else _host_spans)(events)
    flights = _clipped(flights, window)
    merged, busy = union(flights), union(_clipped(work, window))
    exposed = length(minus(merged, busy))
    return Communication(
        in_flight_s=length(merged) * 1e-9 / num_steps,
        exposed_s=exposed * 1e-9 / num_steps,
        waiting_s=_waiting(events, window, busy, on_device=on_device) * 1e-9 / num_steps,
        num_collectives=len(flights) / num_steps,
        step_s=(window[1] - window[0]) * 1e-9 / num_steps,
    )


def _waiting(
    events: Sequence[Event], window: Span, busy: Sequence[Span], *, on_device: bool
) -> float:
    """Time in which the rank does nothing but wait for messages, sending them left out."""
    kernels = [event for event in events if event.on_device]
    if on_device:
        received = messages = [event for event in kernels if _DEVICE_MESSAGE in event.name]
        others = [event for event in kernels if _DEVICE_MESSAGE not in event.name]
    else:
        received = [event for event in events if event.name.startswith(_RECEIVES)]
        messages = [event for event in events if event.name.startswith(_MESSAGES)]
        flying = [event for event in events if event.name.startswith(_LIBRARIES)]
        others = [event for event in flying if not event.name.startswith(_MESSAGES)]
    spans = _clipped(((event.start, event.end) for event in received), window)
    taken = union([*busy, *_clipped(((each.start, each.end) for each in others), window)])
    idle = [length(minus([span], taken)) for span in union(spans)]
    shortest = min((event.end - event.start for event in messages), default=0.0)
    return sum(max(0.0, each - shortest) for each in idle)


def _host_spans(events: Sequence[Event]) -> tuple[list[Span], list[Span]]:
    flights, work = [], []
    computing: dict[int, list[Span]] = {}
    calling: dict[int, list[Span]] = {}
    for event in events:
        span = (event.start, event.end)
        if event.name.startswith(_LIBRARIES):
            flights.append(span)
        elif event.name.startswith(_CALLS):
            calling.setdefault(event.thread, []).append(span)
        elif event.name.startswith(("aten::", "fsdp::")) and not event.is_async:
            computing.setdefault(event.thread, []).append(span)
    for thread, spans in computing.items():
        work += minus(union(spans), union(calling.get(thread, ())))
    return flights, work


def _device_spans(events: Sequence[Event]) -> tuple[list[Span], list[Span]]:
    on_device = [event for event in events if event.on_device]
    flights = [(event.start, event.end) for event in on_device if "nccl" in event.name.lower()]
    work = [(event.start, event.end) for event in on_device if "nccl" not in event.name.lower()]
    return flights, work


def union(spans: Iterable[Span]) -> list[Span]:
    """The moments of some spans, in order and without overlap.

    >>> union([(3, 5), (0, 2), (1, 3)])
    [(0, 5)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def minus(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What is left of some spans outside others; both in order and without overlap.

    >>> minus([(0, 10)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    left: list[Span] = []
    first = 0
    for start, end in spans:
        while first < len(others) and others[first][1] <= start:
            first += 1
        index, at = first, start
        while index < len(others) and others[index][0] < end:
            if others[index][0] > at:
                left.append((at, others[index][0]))
            at = max(at, others[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def length(spans: Iterable[Span]) -> float:
    """Total length of some spans.

    >>> length([(0, 2), (3, 8)])
    7
    """
    return sum(end - start for start, end in spans)


def _clipped(spans: Iterable[Span], window: Span) -> list[Span]:
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in spans if end > low and start < high]


def _event(raw: Any) -> Event:
    start = float(raw.start_ns())
    return Event(
        name=raw.name(),
        start=start,
        end=start + float(raw.duration_ns()),
        thread=raw.start_thread_id(),
        is_async=raw.is_async(),
        on_device=raw.device_type().name in ("CUDA", "HIP"),
    )
