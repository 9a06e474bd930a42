"""A run's own `events.jsonl` as log lines: which ranks were lost and how, and how it ended.

Each line of the file becomes one line of text, so that line numbers stay; what says nothing of a
failure becomes an empty one. What a drill broke on purpose, what the run came through and what it
repaired by itself is a fact of the answer, and no failure.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from paceline.check.diagnose.stacks import Stack, read_stacks
from paceline.record.events import (
    SCRIPT_PHASE,
    AnyEvent,
    CorruptionFound,
    FaultInjected,
    Recovered,
    RunFinished,
    WorkerLost,
    WorkerStarted,
    WorkerStuck,
)
from paceline.record.repair_text import corruption_text, recovery_text

_START = b'{"event":"'
_MOST = 3
"""Most losses, repairs and recoveries that are listed one by one."""


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
    by_line: list[AnyEvent | None] = []
    for raw in data.split(b"\n"):
        try:
            by_line.append(decoder.decode(raw))
        except msgspec.DecodeError:
            by_line.append(None)
    events = [each for each in by_line if each is not None]
    drilled = _drilled(events)
    end = next((each for each in reversed(events) if isinstance(each, RunFinished)), None)
    has_finished = end is not None and end.outcome == "finished"
    lines = ["" if has_finished else _told(each, drilled) for each in by_line]
    return OwnRun(
        text="\n".join(lines).encode() + b"\n",
        facts=_facts(events, drilled, end),
        has_finished=has_finished,
        stacks=() if has_finished else tuple(_stacks(events)),
    )


def _drilled(events: Sequence[AnyEvent]) -> dict[tuple[int, int | None], str]:
    """Rank and pid -> the fault that a drill injected there."""
    return {(each.rank, each.pid): each.fault for each in events if isinstance(each, FaultInjected)}


class WithoutDrills:
    """Leaves out of a run's screen what a drill's fault did to its rank, which is no failure."""

    _TOLD = re.compile(
        rb"\bdrill: (?:[^\n]* at )?rank[ =](?P<hit>\d+)[^\n]* \(pid \d+\)"
        rb"|\brank (?P<rank>\d+)(?: lost \(| is stuck \(|: )[^\r\n]*"
        rb"|\b\d+ ranks? (?P<met>met) over "
    )
    """As `report.event_text.describe` says it."""

    def __init__(self) -> None:
        self._hit: set[bytes] = set()

    def __call__(self, block: bytes) -> bytes:
        """A block of whole lines, after those before it; the number of lines stays."""
        if not self._hit and b"drill: " not in block:
            return block
        return self._TOLD.sub(self._kept, block)

    def _kept(self, told: re.Match[bytes]) -> bytes:
        if told["hit"]:
            self._hit.add(told["hit"])
        elif told["met"]:
            self._hit.clear()
        return b"" if told["rank"] in self._hit else told[0]


def _stacks(events: Sequence[AnyEvent]) -> Iterator[Stack]:
    stuck = {each.rank: each for each in events if isinstance(each, WorkerStuck)}
    for rank, event in sorted(stuck.items()):
        if event.phase == SCRIPT_PHASE:
            yield from read_stacks(event.stacks, source="events.jsonl", rank=rank)


def _told(event: AnyEvent | None, drilled: Mapping[tuple[int, int | None], str]) -> str:
    if isinstance(event, WorkerLost | WorkerStuck) and (event.rank, event.pid) in drilled:
        return ""
    if isinstance(event, WorkerLost):
        words = " ".join((event.detail or "").split())
        told = f"worker lost after step {event.last_step}: {event.how}"
        return f"[rank{event.rank}]: " + (f"{words} ({told})" if words else told)
    if isinstance(event, WorkerStuck):
        stood = f"{event.kind} in {event.phase} of step {event.step} for {event.waited_s:.0f} s"
        return f"[rank{event.rank}]: ERROR worker stuck: {stood}"
    if isinstance(event, RunFinished) and event.outcome == "failed":
        reason = event.reason or "no reason given"
        if any(reason.startswith(f"rank {rank}: ") for rank, _ in drilled):
            reason = "by the drill"
        return f"ERROR the run failed after step {event.step}: {reason}"
    return ""


def _facts(
    events: Sequence[AnyEvent],
    drilled: Mapping[tuple[int, int | None], str],
    end: RunFinished | None,
) -> dict[str, str]:
    """How the run stands; what it repaired and recovered from, and then what is left to do."""
    lost: dict[int, str] = {}
    losses, repaired, recovered = Counter[str](), list[str](), list[str]()
    for number, event in enumerate(events):
        if isinstance(event, WorkerLost):
            how = event.how + ", by the drill" * ((event.rank, event.pid) in drilled)
            lost[event.rank] = f" ({how})"
            losses[f"rank {event.rank} was lost after step {event.last_step} ({how})"] += 1
        elif isinstance(event, Recovered):
            how = lost.pop(event.lost_rank, "")
            step = event.failed_after_step
            loss = f"rank {event.lost_rank} was lost after step {step}{how}"
            recovered.append(f"{loss}: {recovery_text(event)}")
        elif isinstance(event, CorruptionFound):
            drill = ", by the drill" * _is_drilled(event, events[:number])
            repaired.append(corruption_text(event, drill))
    facts = {"drill": _by_drill(events, drilled)} if lost or not _has_failed(end) else {}
    facts |= {"repaired": _joined(repaired), "recovered": _joined(recovered)}
    if (repaired or recovered) and not _has_failed(end):
        facts["to do"] = _to_do(events, drilled)
    run = [f"{end.outcome} at step {end.step}" if end else "its end was not written"]
    run += [_joined([f"{loss}{_times(count)}" for loss, count in losses.items()])]
    run += [f"recovered{_times(len(recovered))}" * bool(recovered)]
    facts["run"] = "; ".join(filter(None, run))
    return {name: fact for name, fact in facts.items() if fact}


def _has_failed(end: RunFinished | None) -> bool:
    return end is not None and end.outcome == "failed"


def _by_drill(events: Sequence[AnyEvent], drilled: Mapping[tuple[int, int | None], str]) -> str:
    """The faults that ended ranks, where a drill's did all of it."""
    lost = [each for each in events if isinstance(each, WorkerLost)]
    if any((each.rank, each.pid) not in drilled for each in lost):
        return ""
    return _joined([f"{drilled[e.rank, e.pid]} (rank {e.rank} {e.how})" for e in lost])


def _joined(found: Sequence[str]) -> str:
    more = [f"{len(found) - _MOST} more"] if len(found) > _MOST else []
    return "; ".join([*found[:_MOST], *more])


def _times(count: int) -> str:
    return f" {count} times" if count > 1 else ""


def _to_do(events: Sequence[AnyEvent], drilled: Mapping[tuple[int, int | None], str]) -> str:
    """What a person should look at: a machine that was wrong, or a loss without a cause."""
    wrong: dict[str, int] = {}
    is_unknown = False
    for number, event in enumerate(events):
        if isinstance(event, CorruptionFound) and not _is_drilled(event, events[:number]):
            is_unknown |= not event.ranks
            for rank in event.ranks:
                place = _place(rank, events[:number])
                wrong[place] = wrong.get(place, 0) + 1
    advice = [
        f"{place} was wrong {count} times: test its memory, or leave it out"
        for place, count in wrong.items()
        if count > 1
    ]
    if wrong and not advice:
        advice = [f"if {' or '.join(wrong)} is named again, test its memory"]
    if is_unknown and not wrong:
        advice = [
            "if it happens again, recovery.fingerprint_every=1 or three replicas name the rank"
        ]
    losses = [each for each in events if isinstance(each, WorkerLost)]
    advice += [
        f"rank {each.rank} was {each.how}: the kernel's log of node {each.node} may have "
        "the reason (paceline diagnose dmesg.txt)"
        for each in losses
        if "SIGKILL" in each.how and (each.rank, each.pid) not in drilled
    ][:1]
    return "; ".join(["nothing for this run", *advice])


def _is_drilled(event: CorruptionFound, before: Sequence[AnyEvent]) -> bool:
    ranks = {*event.ranks, *event.suspects}
    return any(
        isinstance(each, FaultInjected) and each.fault.startswith("flip ") and each.rank in ranks
        for each in before
    )


def _place(rank: int, before: Sequence[AnyEvent]) -> str:
    starts = [each.node for each in before if isinstance(each, WorkerStarted) and each.rank == rank]
    return f"rank {rank}" + (f" (node {starts[-1]})" if starts else "")
