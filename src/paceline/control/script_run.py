"""People's own scripts: all ranks started together, watched, ended together, started again.

`decide(state, event, now) -> actions`, pure like `core.py`. What is known of a script are its
exits and its output. When one rank ends badly, or none has printed anything for too long, all ranks
of the attempt are ended, and after a pause all are started again; the script loads its own
checkpoint. An error before the first sign of progress would only come again: it ends the run.

Leaves out: recovery in place, which needs our runtime, and more than one machine.
"""

import signal
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from paceline.control.policy import how_it_ended
from paceline.control.state import Clock, Outcome
from paceline.errors import CrashLoop, RunError
from paceline.record import events as log
from paceline.units import counted

PROGRESS_S = 600.0
"""An attempt that lasted so long counts as progress. A guess, ten of the longest pauses."""

START_S = 60.0
"""An attempt that lasted so long has started, also without a line of progress that we understand.
A guess: imports and a small model take less."""

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that others send. What a program does to itself (SIGSEGV, SIGABRT) would come again."""

LEAST_SILENCE_S = 600.0
"""The least that is learned for `auto`. A guess: above most evaluations and saves."""

SILENCE_GAPS = 20
"""How many times the longest pause between two prints so far is a hang. A guess."""

_RHYTHM = 5
"""Ticks with progress after which an attempt has a rhythm."""

STACKS_S = 30.0
"""How long ranks may take to be looked at before they are ended. A guess: py-spy takes 0.3 s, and
much longer on a busy machine; the run stands still anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What does not change during a run."""

    num_ranks: int
    name: str
    word: Literal["rank", "node"] = "rank"
    """What `num_ranks` counts: ranks of the program, or nodes with a launcher each."""

    max_restarts: int
    backoff_s: float = 1.0
    most_backoff_s: float = 60.0
    silence_s: float | Literal["auto"] | None = None
    """Without a line of any rank for so long, the attempt hangs; `auto` learns it from the script's
    own rhythm, None never ends it."""

    num_steps: int | None = None
    """Steps that it trains; None where that is not known."""

    step_before: int = 0
    """The newest step of the run when this part of it began."""

    grace_s: float = 60.0
    versions: dict[str, str] = field(default_factory=dict)
    first_attempt: int = 1
    resumed: bool = False


@dataclass(slots=True, kw_only=True)
class State:
    """Everything that is known. `decide` alone changes it."""

    setup: Setup
    phase: Literal["pausing", "running", "looking", "ending", "over"] = "pausing"
    attempt: int = 0
    restarts: int = 0
    failures: int = 0
    """In a row, without an attempt that lasted."""

    alive: dict[int, int] = field(default_factory=dict)
    """Process of each rank that runs."""

    ended: dict[int, int] = field(default_factory=dict)
    began_s: float = 0.0
    heard_s: float = 0.0
    """When a rank last printed something."""

    longest_gap_s: float = 0.0
    """The longest time between two prints after an attempt's first progress."""

    num_progressed: int = 0
    """Ticks of this attempt with progress."""

    is_silence_noted: bool = False
    hangs: int = 0
    """Attempts that were ended for silence: each doubles what is learned."""

    due_s: float | None = None
    """When a pause, or patience, is over."""

    step: int = 0
    """The newest that the script has shown."""

    has_progressed: bool = False
    """Whether any attempt has shown progress: a step, a number, a checkpoint."""

    is_hopeless: bool = False
    """Whether this attempt ended in an error that another start would only repeat."""

    raised: "Raised | None" = None
    """What ended the newest attempt."""

    why: str | None = None
    stop_by: str | None = None
    stops: int = 0
    outcome: Outcome | None = None
    reason: str | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """Take charge."""


@dataclass(frozen=True, slots=True)
class Started:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The command cannot be run at all."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """What a rank printed at its end."""

    rank: int
    lines: tuple[str, ...]
    """The end of its traceback, or of its output."""

    words: str | None = None
    """The line that names the error; None where no line does."""

    is_passing: bool = False
    """Whether it comes from outside of the script, so that another start may do."""


@dataclass(frozen=True, slots=True)
class Exited:
    rank: int
    attempt: int
    returncode: int
    """As in `subprocess`: negative is the signal."""

    out_of_memory: bool = False
    raised: Raised | None = None
    """What ended the attempt, as the logs of all ranks show it; None where they are empty."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Some rank printed something since the last tick."""

    has_progressed: bool = False
    """Whether any of it was progress."""

    step: int = 0
    """The newest step it shows, as far as is known."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Where the ranks stand, by rank."""

    attempt: int
    stacks: dict[int, str]


@dataclass(frozen=True, slots=True)
class StopWanted:
    by: str


@dataclass(frozen=True, slots=True)
class Found:
    """Something for the record that was found beside the run; an alert may ask to stop it."""

    event: log.Reported


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Happening = Begin | Started | NotStarted | Exited | Printed | Looked | StopWanted | Found | Tick


@dataclass(frozen=True, slots=True)
class Start:
    """Start all ranks, with a meeting place that nobody has used."""

    attempt: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal: SIGTERM to the ranks, SIGKILL to them and whatever they started."""

    number: int


@dataclass(frozen=True, slots=True)
class Look:
    """Find out where every rank stands."""


@dataclass(frozen=True, slots=True)
class Record:
    event: log.AnyEvent


Action = Start | Signal | Look | Record


def decide(state: State, event: Happening, clock: Clock) -> list[Action]:
    """Advance the state, and say what to do now."""
    if state.phase == "over":
        return []
    actions = _decide(state, event, clock)
    at, generation = clock.unix_s, state.attempt
    return [
        Record(msgspec.structs.replace(each.event, at=at, generation=generation))
        if isinstance(each, Record)
        else each
        for each in actions
    ]


def _decide(state: State, event: Happening, clock: Clock) -> list[Action]:
    match event:
        case Begin():
            setup = state.setup
            started = log.RunStarted(
                num_ranks=setup.num_ranks,
                num_nodes=1,
                num_steps=0,
                resumed=setup.resumed,
                layout=setup.name,
                versions=setup.versions,
            )
            return [Record(started), *_start(state, clock)]
        case Started(rank, pid):
            state.alive[rank] = pid
            return [Record(log.WorkerStarted(rank=rank, node=0, pid=pid))]
        case NotStarted(rank, reason):
            loss = _lost(rank, reason, cause="program")
            return [loss, *_over(state, "failed", f"{state.setup.word} {rank}: {reason}")]
        case Exited() if event.attempt == state.attempt:
            return _exited(state, event, clock)
        case Printed(has_progressed, step):
            state.step = step
            return _printed(state, has_progressed, clock)
        case Looked() if event.attempt == state.attempt and state.phase == "looking":
            return _hangs(state, event.stacks, clock)
        case StopWanted(by):
            return _stop_wanted(state, by, clock)
        case Found(event=log.AlertFired(on_alert="stop", rule=rule) as fired) if not state.stops:
            return [Record(fired), *_stop_wanted(state, f"alert {rule}", clock)]
        case Found(event=found):
            return [Record(found)]
        case Tick():
            return _tick(state, clock)
    return []


def _start(state: State, clock: Clock) -> list[Action]:
    state.phase, state.due_s, state.why = "running", None, None
    state.attempt = state.setup.first_attempt + state.restarts
    state.alive, state.ended, state.num_progressed = {}, {}, 0
    state.began_s = state.heard_s = clock.monotonic_s
    return [Start(state.attempt, state.restarts)]


def _printed(state: State, has_progressed: bool, clock: Clock) -> list[Action]:
    if state.num_progressed:
        state.longest_gap_s = max(state.longest_gap_s, clock.monotonic_s - state.heard_s)
    state.heard_s = clock.monotonic_s
    if state.phase == "looking":  # it goes on
        state.phase, state.due_s = "running", None
    if has_progressed:
        state.has_progressed = True
        state.num_progressed += 1
    limit_s = silence_limit_s(state)
    is_new = clock.monotonic_s - state.began_s < START_S  # of a script that is soon over
    if state.setup.silence_s != "auto" or limit_s is None or is_new or state.is_silence_noted:
        return []
    state.is_silence_noted = True
    word = state.setup.word
    text = (
        f"if no {word} prints anything for {limit_s / 60:g} min or more ({SILENCE_GAPS} times the "
        f"longest pause so far), all {word}s are started again; --silence changes this"
    )
    return [Record(log.Noted(text=text))]


def silence_limit_s(state: State) -> float | None:
    """How long no rank may print anything now; None is for ever."""
    asked = state.setup.silence_s
    if asked != "auto":
        return asked
    if state.num_progressed < _RHYTHM:
        return None
    return max(LEAST_SILENCE_S, SILENCE_GAPS * state.longest_gap_s) * 2.0**state.hangs


def _exited(state: State, event: Exited, clock: Clock) -> list[Action]:
    pid = state.alive.pop(event.rank, None)
    state.ended[event.rank] = event.returncode
    actions: list[Action] = []
    if event.returncode != 0 and state.phase in ("running", "looking") and state.stop_by is None:
        actions += _failed(state, event, pid, clock)
    if len(state.ended) < state.setup.num_ranks:
        return actions
    if state.stop_by is not None:
        return [*actions, *_over(state, "interrupted", f"stopped by {state.stop_by}")]
    if state.phase == "running":  # and so all exits were 0
        reached, wanted = max(state.step, state.setup.step_before), state.setup.num_steps
        if wanted is None or reached >= wanted:
            return [*actions, *_over(state, "finished", None)]
        how = f"exited with 0 after step {reached} of {wanted}"
        state.is_hopeless = not state.has_progressed
        actions += [
            _lost(event.rank, how, pid=pid, cause="process", last_step=reached),
            *_end(state, f"every {state.setup.word} {how}", clock),
        ]
    return [*actions, *_try_again(state, clock)]


def _failed(state: State, event: Exited, pid: int | None, clock: Clock) -> list[Action]:
    """The first rank of an attempt ended badly: who began it, and why."""
    rank, raised = event.rank, event.raised
    how = how_it_ended(event.returncode, out_of_memory=event.out_of_memory)
    if raised is not None and raised.rank != rank:
        rank, pid = raised.rank, state.alive.get(raised.rank)
        lost_it = f"{state.setup.word} {event.rank}, which lost it,"
        how = f"raised an exception; {lost_it} {how}"
    words = raised.words if raised is not None and event.returncode > 0 else None
    cause = "out of memory" if event.out_of_memory else "process"
    state.raised = raised
    lasted = clock.monotonic_s - state.began_s >= START_S
    is_outside = -event.returncode in _FROM_OUTSIDE or (raised is not None and raised.is_passing)
    state.is_hopeless = not (state.has_progressed or lasted or is_outside)
    why = f"{state.setup.word} {rank}: {how}" + (f": {words}" if words else "")
    lost = _lost(rank, how, pid=pid, cause=cause, last_step=state.step, detail=words)
    return [lost, *_end(state, why, clock)]


def _end(state: State, why: str, clock: Clock) -> list[Action]:
    state.phase, state.why, state.due_s = "ending", why, None
    if clock.monotonic_s - state.began_s >= PROGRESS_S:
        state.failures = 0
    state.failures += 1
    return [Signal(signal.SIGKILL)]


def _try_again(state: State, clock: Clock) -> list[Action]:
    setup = state.setup
    if state.is_hopeless and setup.max_restarts:
        return _over(state, "failed", f"{state.why}; {_HOPELESS}")
    if state.failures > setup.max_restarts:
        restarts = counted(setup.max_restarts, "restart")
        tried = f"; {restarts} in a row did not last" if state.restarts else ""
        state.exit_code = CrashLoop.exit_code if setup.max_restarts else RunError.exit_code
        return _over(state, "failed", f"{state.why}{tried}")
    pause_s = min(setup.backoff_s * 2 ** (state.failures - 1), setup.most_backoff_s)
    state.phase, state.due_s = "pausing", clock.monotonic_s + pause_s
    state.restarts += 1
    text = f"starting all {setup.word}s again in {pause_s:g} s; the script loads its own checkpoint"
    noted = log.Noted(text=text)
    return [Record(noted)]


_HOPELESS = "not started again: it failed before any sign of progress, and would likely do so again"


def _hangs(state: State, stacks: dict[int, str], clock: Clock) -> list[Action]:
    silence_s, limit_s = clock.monotonic_s - state.heard_s, silence_limit_s(state)
    state.hangs += 1
    actions: list[Action] = [
        Record(
            log.WorkerStuck(
                rank=rank,
                node=0,
                pid=pid,
                kind="silent",
                phase=log.SCRIPT_PHASE,
                step=state.step,
                waited_s=silence_s,
                limit_s=limit_s,
                stacks=stacks.get(rank, ""),
            )
        )
        for rank, pid in sorted(state.alive.items())
    ]
    how = f"no {state.setup.word} has printed anything for {silence_s:.1f} s"
    rank, pid = min(state.alive.items(), default=(0, 0))
    actions.append(_lost(rank, how, pid=pid, cause="hang", last_step=state.step))
    return [*actions, *_end(state, how, clock)]


def _tick(state: State, clock: Clock) -> list[Action]:
    now, silence_s = clock.monotonic_s, silence_limit_s(state)
    if state.due_s is not None and now >= state.due_s:
        state.due_s = None
        if state.phase == "pausing":
            return _start(state, clock)
        if state.phase == "looking":
            return _hangs(state, {}, clock)
        return [Signal(signal.SIGKILL)]
    is_silent = silence_s is not None and now - state.heard_s >= silence_s
    if state.phase == "running" and state.stop_by is None and is_silent:
        state.phase, state.due_s = "looking", now + STACKS_S
        return [Look()]
    return []


def _stop_wanted(state: State, by: str, clock: Clock) -> list[Action]:
    state.stop_by, state.stops = by, state.stops + 1
    asked = Record(log.StopAsked(by=by))
    if not state.alive and state.phase == "pausing":
        return [asked, *_over(state, "interrupted", f"stopped by {by}")]
    if state.stops > 1:
        return [asked, Signal(signal.SIGKILL)]
    state.due_s = clock.monotonic_s + state.setup.grace_s
    return [asked, Signal(signal.SIGTERM)]


def _over(state: State, outcome: Outcome, reason: str | None) -> list[Action]:
    state.phase, state.outcome, state.reason = "over", outcome, reason
    if outcome == "interrupted":
        state.exit_code = 130
    elif outcome == "failed":
        state.exit_code = state.exit_code or RunError.exit_code
    end = log.RunFinished(
        outcome=outcome,
        step=state.step,
        restarts=state.restarts,
        reason=reason,
        exactness="unknown",
    )
    return [Signal(signal.SIGKILL), Record(end)]


def _lost(rank: int, how: str, **more: Any) -> Record:
    return Record(log.WorkerLost(rank=rank, node=0, how=how, **more))
