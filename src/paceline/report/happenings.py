"""What happened in a run, as plain values for its page: events in words, marks, ranks, alerts.

All from events. Leaves out: numbers of steps (`curves.py`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from paceline.control.alerts import is_firing
from paceline.record import events as log
from paceline.record.machines import RankSample
from paceline.report.alert_text import alert_line, alert_text
from paceline.report.event_text import describe
from paceline.report.time_account import HEADINGS, recovery_phases
from paceline.units import counted, format_bytes, format_seconds

_NAMES = {key: name for key, _, name, _ in HEADINGS}

_MOST_EVENTS = 300
"""Newest events that the page lists. A guess: a screen shows twenty."""

_MOST_MARKS = 200
"""Newest marks and recoveries that the curves show."""

_MOST_TEXT = 4000
"""Characters of one event: a traceback fits, a flood does not."""

_HIDDEN = {"event", "at", "generation", "pids", "versions", "stacks", "baseline_bytes"}
"""Fields that are too long for a line, or are shown elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event for people."""

    at: float
    level: str
    """`bad`, `good` or `plain`."""

    name: str
    text: str
    more: str = ""
    """Lines that are shown when asked for: stacks, a last traceback."""


def happenings(events: Sequence[log.AnyEvent]) -> list[Happening]:
    """The newest events, oldest first."""
    return [_happening(event) for event in events[-_MOST_EVENTS:]]


def _happening(event: log.AnyEvent) -> Happening:
    level, text = _say(event)
    more = getattr(event, "stacks", "") or getattr(event, "detail", None) or ""
    return Happening(
        at=event.at,
        level=level,
        name=type(event).__name__,
        text=text[:_MOST_TEXT],
        more=more[:_MOST_TEXT] if isinstance(more, str) else "",
    )


def _say(event: log.AnyEvent) -> tuple[str, str]:
    """Level and text; the words are those of the console, where it prints the event."""
    match event:
        case log.RunStarted():
            verb = "resumed" if event.resumed else "started"
            ranks, nodes = counted(event.num_ranks, "rank"), counted(event.num_nodes, "node")
            return "plain", f"{verb} on {ranks} of {nodes}: {event.layout}"
        case log.WorkerStarted():
            who = "a spare" if event.rank is None else f"rank {event.rank}"
            return "plain", f"{who} is process {event.pid} on node {event.node}"
        case log.CheckpointSaved():
            size = "" if event.num_bytes is None else f": {format_bytes(event.num_bytes)}"
            stall = (
                ""
                if event.stall_s is None
                else f", training stood still for {format_seconds(event.stall_s)}"
            )
            return "plain", f"{event.checkpoint} saved{size}{stall}"
        case log.AlertFired() | log.AlertOver():
            return _level(event), alert_line(event)
        case log.RunFinished():
            level = {"finished": "good", "failed": "bad"}.get(event.outcome, "plain")
            why = f": {event.reason}" if event.reason else ""
            return level, f"{event.outcome} after step {event.step}{why}"
        case _:
            return _level(event), describe(event) or _fields(event)


_BAD = (
    *("Failed", "Refused", "Corruption", "SetAside", "Skipped", "NotSent"),
    *("WorkerLost", "WorkerStuck", "StragglerNamed", "LossOutlierNamed", "AlertFired"),
)
"""Parts of the names of events that are bad news."""


def _level(event: log.AnyEvent) -> str:
    name = type(event).__name__
    if name == "Recovered":
        return "good"
    is_bad = any(sign in name for sign in _BAD) or getattr(event, "is_fatal", False)
    return "bad" if is_bad and getattr(event, "severity", None) != "info" else "plain"


def _fields(event: log.AnyEvent) -> str:
    """`step 5, reason no space left`."""
    known = msgspec.structs.asdict(event)
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.6g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in known.items()
        if name not in _HIDDEN and value not in (None, "", [], {})
    )


def alerts(events: Sequence[log.AnyEvent]) -> list[dict[str, Any]]:
    """The newest alerts, each with whether it still holds, or held when the run ended."""
    fired = [event for event in events if isinstance(event, log.AlertFired)][-_MOST_MARKS:]
    firing = {id(event) for event in is_firing(events)}
    return [
        {
            "rule": event.rule,
            "of": event.of,
            "severity": event.severity,
            "at": event.at,
            "step": event.step or 0,
            "text": alert_text(event),
            "is_on": id(event) in firing,
        }
        for event in fired
    ]


def marks(events: Sequence[log.AnyEvent]) -> dict[str, list[dict[str, Any]]]:
    """What the curves show besides numbers, by time and by step.

    Returns:
        `failures`: when, in which step and what. `recoveries`: their phases, one after the other.
        `repeated`: stretches of steps that were computed again. `stragglers`: when and which.
    """
    failures, recoveries, repeated, slow = [], [], [], []
    for event in events:
        if isinstance(event, log.WorkerLost):
            text = f"rank {event.rank} {event.how}"[:80]
            failures.append({"at": event.at, "step": event.last_step, "text": text})
        elif isinstance(event, log.StragglerNamed):
            text = f"rank {event.rank} slow, {event.factor:.2f}x"
            slow.append({"at": event.at, "step": event.step, "text": text})
        elif isinstance(event, log.Recovered):
            recoveries.append(_phases(event))
            if event.steps_lost:
                last = event.failed_after_step
                repeated.append({"from": event.resumed_from_step, "to": last})
    return {
        "failures": failures[-_MOST_MARKS:],
        "recoveries": recoveries[-_MOST_MARKS:],
        "repeated": repeated[-_MOST_MARKS:],
        "stragglers": slow[-_MOST_MARKS:],
    }


def _phases(event: log.Recovered) -> dict[str, Any]:
    start = event.at - event.downtime_s
    phases = []
    for key, seconds in recovery_phases(event):
        if seconds > 0:
            phases.append({"key": key, "name": _NAMES[key], "at": start, "seconds": seconds})
            start += seconds
    return {"step": event.failed_after_step, "phases": phases}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank that is not as the others."""

    rank: int
    state: str
    """`slow`, `stuck`, `lost` or `corrupt`."""

    phase: str
    step: int
    text: str


@dataclass(slots=True, kw_only=True)
class Ranks:
    """State of every rank, as far as events say."""

    num: int = 0
    per_node: int = 1
    usual: str = "unknown"
    """Phase of every rank that is not in `odd`: `starting`, `training`, `recovering`, `stopping`,
    `ended` or `unknown`."""

    odd: dict[int, RankState] = field(default_factory=dict)


def ranks_of(
    events: Sequence[log.AnyEvent],
    *,
    is_running: bool,
    stepped_at: float | None = None,
    seen: Sequence[RankSample] = (),
) -> dict[str, Any]:
    """State of every rank after the last event, ready for the page.

    Args:
        events: The run's.
        is_running: Whether a process holds the run now.
        stepped_at: When its newest step was finished: a script says nothing else of training.
        seen: Where ranks were a moment ago, as their agents saw them.
    """
    ranks = Ranks()
    for event in events:
        _fold(ranks, event)
    if stepped_at is not None and ranks.usual in ("starting", "recovering"):
        kinds = log.TrainingStarted | log.WorkerStarted
        began = [event for event in events if isinstance(event, kinds)]
        is_script = not any(isinstance(event, log.TrainingStarted) for event in began)
        if is_script and began and stepped_at > began[-1].at:
            ranks.usual = "training"
    if not is_running and ranks.usual not in ("ended", "unknown"):
        ranks.usual = "unknown"
    phases: dict[str, list[int]] = {}
    for each in seen if is_running else ():
        if each.rank < ranks.num and each.rank not in ranks.odd:
            phases.setdefault(each.phase, []).append(each.rank)
    odd = sorted(ranks.odd.values(), key=lambda each: each.rank)
    return {
        "num": ranks.num,
        "per_node": ranks.per_node,
        "usual": ranks.usual,
        "phases": phases,
        "odd": [asdict(each) for each in odd],
    }


def _fold(ranks: Ranks, event: log.AnyEvent) -> None:
    """What an event changes in what is known of the ranks."""
    match event:
        case log.RunStarted():
            ranks.num, ranks.usual, ranks.odd = event.num_ranks, "starting", {}
            ranks.per_node = max(1, event.num_ranks // max(1, event.num_nodes))
        case log.WorldChanged():
            ranks.num, ranks.odd = event.num_ranks, {}
        case log.WorkerStarted():
            if event.rank is not None:
                ranks.odd.pop(event.rank, None)
        case log.TrainingStarted():
            ranks.usual, ranks.odd = "training", {}
        case log.Recovered():
            ranks.usual = "training"
        case log.StopAsked():
            ranks.usual = "stopping"
        case log.RunFinished():
            ranks.usual = "ended"
            if event.outcome != "failed":
                ranks.odd = {}
        case log.WorkerLost():
            ranks.usual = "recovering"
            _mark(ranks, event.rank, "lost", step=event.last_step, text=event.how)
        case log.WorkerStuck():
            text = f"{event.kind}, for {format_seconds(event.waited_s)}"
            _mark(ranks, event.rank, "stuck", phase=event.phase, step=event.step, text=text)
        case log.StragglerNamed():
            text = f"{event.factor:.2f} times as long as its peers"
            _mark(ranks, event.rank, "slow", step=event.step, text=text)
        case log.CorruptionFound():
            for rank in event.ranks:
                _mark(ranks, rank, "corrupt", step=event.step, text=event.verdict)
        case _:
            pass


def _mark(
    ranks: Ranks, rank: int, state: str, *, phase: str = "", step: int = 0, text: str = ""
) -> None:
    ranks.odd[rank] = RankState(rank=rank, state=state, phase=phase, step=step, text=text[:200])
