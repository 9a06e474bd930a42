"""A run's own `events.jsonl`, told as log lines: which ranks were lost and how, and how it ended.

Each line of the file becomes one line of text, so that line numbers stay; what says nothing of a
failure becomes an empty one. What a drill broke on purpose, and what the run came through, is no
failure and is told as a fact.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from paceline.check.diagnose.healed import healed_facts
from paceline.check.diagnose.stacks import Stack, read_stacks
from paceline.record.events import (
    SCRIPT_PHASE,
    AnyEvent,
    FaultInjected,
    Recovered,
    RunFinished,
    WorkerLost,
    WorkerStuck,
)

_START = b'{"event":"'
_MOST = 3
"""Losses that are told one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """What a run's events say."""

    text: bytes
    """A line for each event."""

    facts: dict[str, str]
    """How the run stands, what it repaired by itself, and what is left to do, in words."""

    has_finished: bool
    stacks: tuple[Stack, ...] = ()
    """Where the ranks of a script stood when nothing was printed any more."""


def is_events(start: bytes) -> bool:
    """Whether a file that begins so is a run's events."""
    return start.startswith(_START)


def read_own_run(data: bytes) -> OwnRun:
    """The events of a run; lines that are damaged or of a later version say nothing."""
    decoder = msgspec.json.Decoder(AnyEvent)
    events: list[AnyEvent | None] = []
    for raw in data.split(b"\n"):
        try:
            events.append(decoder.decode(raw))
        except msgspec.DecodeError:
            events.append(None)
    drilled = {(each.rank, each.pid) for each in events if isinstance(each, FaultInjected)}
    end = next((each for each in reversed(events) if isinstance(each, RunFinished)), None)
    has_finished = end is not None and end.outcome == "finished"
    lines = ["" if has_finished else _told(each, drilled) for each in events]
    return OwnRun(
        text="\n".join(lines).encode() + b"\n",
        facts=healed_facts([each for each in events if each is not None], drilled)
        | {"run": _fact(events, drilled, end)},
        has_finished=has_finished,
        stacks=() if has_finished else tuple(_stacks(events)),
    )


def _stacks(events: Iterable[AnyEvent | None]) -> Iterator[Stack]:
    stuck = {each.rank: each for each in events if isinstance(each, WorkerStuck)}
    for rank, event in sorted(stuck.items()):
        if event.phase == SCRIPT_PHASE:
            yield from read_stacks(event.stacks, source="events.jsonl", rank=rank)


def _told(event: AnyEvent | None, drilled: set[tuple[int, int]]) -> str:
    if isinstance(event, WorkerLost) and (event.rank, event.pid) not in drilled:
        words = " ".join((event.detail or "").split())
        told = f"worker lost after step {event.last_step}: {event.how}"
        return f"[rank{event.rank}]: " + (f"{words} ({told})" if words else told)
    if isinstance(event, WorkerStuck):
        stood = f"{event.kind} in {event.phase} of step {event.step} for {event.waited_s:.0f} s"
        return f"[rank{event.rank}]: ERROR worker stuck: {stood}"
    if isinstance(event, RunFinished) and event.outcome == "failed":
        return f"ERROR the run failed after step {event.step}: {event.reason or 'no reason given'}"
    return ""


def _fact(
    events: Iterable[AnyEvent | None], drilled: set[tuple[int, int]], end: RunFinished | None
) -> str:
    kept = [each for each in events if each is not None]
    parts = [f"{end.outcome} at step {end.step}" if end else "its end was not written"]
    losses = Counter(
        f"rank {each.rank} was lost after step {each.last_step} ({each.how}"
        + (", by the drill)" if (each.rank, each.pid) in drilled else ")")
        for each in kept
        if isinstance(each, WorkerLost)
    )
    told = [f"{loss}{_times(count)}" for loss, count in losses.items()]
    parts += told[:_MOST] + ([f"{len(told) - _MOST} more"] if len(told) > _MOST else [])
    recovered = sum(isinstance(each, Recovered) for each in kept)
    return "; ".join([*parts, *([f"recovered{_times(recovered)}"] if recovered else [])])


def _times(count: int) -> str:
    return f" {count} times" if count > 1 else ""
