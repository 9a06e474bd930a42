"""Programs that do not use our runtime: started together, watched, ended together, started again.

`decide(state, event, now) -> actions`, pure like `core.py`. Such a program says nothing to us: what
there is to see are its exits and its output. So when one rank ends badly, or none has printed
anything for too long, all ranks of the attempt are ended, and after a pause all are started again;
what they go on from is the program's own affair.

Leaves out: going on in place, which needs our runtime, and more than one machine.
"""

import signal
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from paceline.control.policy import how_it_ended
from paceline.control.state import Clock, Outcome
from paceline.errors import CrashLoop, RunError
from paceline.record import events as log

PROGRESS_S = 600.0
"""An attempt that lasted so long counts as progress. A guess, ten of the longest pauses."""

_STACKS_S = 2.0
"""How long ranks may take to be looked at before they are ended. A guess: py-spy takes 0.3 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What does not change during a run."""

    num_ranks: int
    name: str
    """Of the program, for the record."""

    max_restarts: int
    backoff_s: float = 1.0
    most_backoff_s: float = 60.0
    silence_s: float | None = None
    """Without a word of any rank for so long, the attempt hangs; None never says so."""

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
    """Exit status of the ranks of this attempt that are through."""

    began_s: float = 0.0
    heard_s: float = 0.0
    """When a rank last printed something."""

    due_s: float | None = None
    """When a pause, or patience, is over."""

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


@dataclass(frozen=True, slots=True)
class Exited:
    rank: int
    attempt: int
    returncode: int
    """As in `subprocess`: negative is the signal."""

    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """Some rank printed something since the last tick."""


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
            return [Record(_run_started(state)), *_start(state, clock)]
        case Started(rank, pid):
            state.alive[rank] = pid
            return [Record(log.WorkerStarted(rank=rank, node=0, pid=pid))]
        case NotStarted(rank, reason):
            loss = _lost(rank, reason, cause="program")
            return [loss, *_over(state, "failed", f"rank {rank}: {reason}")]
        case Exited() if event.attempt == state.attempt:
            return _exited(state, event, clock)
        case Printed():
            state.heard_s = clock.monotonic_s
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
    state.alive, state.ended = {}, {}
    state.began_s = state.heard_s = clock.monotonic_s
    return [Start(state.attempt, state.restarts)]


def _exited(state: State, event: Exited, clock: Clock) -> list[Action]:
    pid = state.alive.pop(event.rank, None)
    state.ended[event.rank] = event.returncode
    actions: list[Action] = []
    if event.returncode != 0 and state.phase in ("running", "looking") and state.stop_by is None:
        how = how_it_ended(event.returncode, out_of_memory=event.out_of_memory)
        cause = "out of memory" if event.out_of_memory else "process"
        actions.append(_lost(event.rank, how, pid=pid, cause=cause))
        actions += _end(state, f"rank {event.rank}: {how}", clock)
    if len(state.ended) < state.setup.num_ranks:
        return actions
    if state.stop_by is not None:
        return [*actions, *_over(state, "interrupted", f"stopped by {state.stop_by}")]
    if state.phase == "running":  # and so all exits were 0
        return [*actions, *_over(state, "finished", None)]
    return [*actions, *_try_again(state, clock)]


def _end(state: State, why: str, clock: Clock) -> list[Action]:
    state.phase, state.why, state.due_s = "ending", why, None
    if clock.monotonic_s - state.began_s >= PROGRESS_S:
        state.failures = 0
    state.failures += 1
    return [Signal(signal.SIGKILL)]


def _try_again(state: State, clock: Clock) -> list[Action]:
    setup = state.setup
    if state.failures > setup.max_restarts:
        tried = f"; {setup.max_restarts} restart(s) in a row did not last" if state.restarts else ""
        state.exit_code = CrashLoop.exit_code if setup.max_restarts else RunError.exit_code
        return _over(state, "failed", f"{state.why}{tried}")
    pause_s = min(setup.backoff_s * 2 ** (state.failures - 1), setup.most_backoff_s)
    state.phase, state.due_s = "pausing", clock.monotonic_s + pause_s
    state.restarts += 1
    text = f"starting all ranks again in {pause_s:g} s, from what the program itself has saved"
    noted = log.Noted(text=text)
    return [Record(noted)]


def _hangs(state: State, stacks: dict[int, str], clock: Clock) -> list[Action]:
    silence_s = clock.monotonic_s - state.heard_s
    actions: list[Action] = [
        Record(
            log.WorkerStuck(
                rank=rank,
                node=0,
                pid=pid,
                kind="silent",
                phase="its own program",
                step=0,
                waited_s=silence_s,
                limit_s=state.setup.silence_s,
                stacks=stacks.get(rank, ""),
            )
        )
        for rank, pid in sorted(state.alive.items())
    ]
    how = f"no rank has printed anything for {silence_s:.1f} s"
    rank, pid = min(state.alive.items(), default=(0, 0))
    actions.append(_lost(rank, how, pid=pid, cause="hang"))
    return [*actions, *_end(state, how, clock)]


def _tick(state: State, clock: Clock) -> list[Action]:
    now, silence_s = clock.monotonic_s, state.setup.silence_s
    if state.due_s is not None and now >= state.due_s:
        state.due_s = None
        if state.phase == "pausing":
            return _start(state, clock)
        if state.phase == "looking":
            return _hangs(state, {}, clock)
        return [Signal(signal.SIGKILL)]
    is_silent = silence_s is not None and now - state.heard_s >= silence_s
    if state.phase == "running" and state.stop_by is None and is_silent:
        state.phase, state.due_s = "looking", now + _STACKS_S
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
        step=0,
        saved_step=None,
        state_digest=None,
        held_out_loss=None,
        restarts=state.restarts,
        reason=reason,
        exactness="unknown",
        baseline_bytes=[],
        peak_bytes=[],
    )
    return [Signal(signal.SIGKILL), Record(end)]


def _run_started(
    state: State,
) -> log.RunStarted:
    setup = state.setup
    return log.RunStarted(
        num_ranks=setup.num_ranks,
        num_nodes=1,
        num_steps=0,
        resumed=setup.resumed,
        layout=setup.name,
        versions=setup.versions,
    )


def _lost(rank: int, how: str, *, pid: int | None = None, cause: str) -> Record:
    return Record(
        log.WorkerLost(
            rank=rank,
            node=0,
            pid=pid,
            how=how,
            detail=None,
            last_step=0,
            cause=cause,
        )
    )


def environment(
    rank: int, *, num_ranks: int, port: int, restarts: int, threads: int
) -> dict[str, str]:
    """What torchrun would put into a rank's environment, and how often it was started again.

    >>> sorted(environment(1, num_ranks=4, port=29500, restarts=0, threads=1))[:3]
    ['GROUP_RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE']
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "PACELINE_RESTART": str(restarts),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
