"""What a loss means, and what is done about it: pure, from the loss and those before it.

From the gentlest to the last resort:

    retry             the process is sound and does the step again, with all others
    meet again        nobody ended, a connection did: the same processes form new groups
    replace process   a spare or a new process takes the rank
    replace node      the same, and the ranks that this node loses go to other nodes from now on
    clear             every process is ended, and the run resumes from a checkpoint: the last
                      attempt, where living processes do not hold a whole state together
    skip              the batch of this step is left out, where the job allows it
    stop

Shrinking has no rung: it is what filling a slot comes to when nothing is left to fill it with.

Leaves out: how a rung is carried out (`worker_loss.py`).
"""

import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from paceline.control.error_texts import names_lost_peer, names_want_of_memory
from paceline.control.messages import Crashed
from paceline.errors import CrashLoop, RunError
from paceline.units import counted

Cause = Literal[
    "program",
    "data or software",
    "exception",
    "out of memory",
    "accelerator",
    "process",
    "node",
    "hang",
    "network",
    "slow",
]
"""`program`: what a person has to fix. `data or software`: the same exception in the same step on
two processes, so it is no process's fault. `exception`: one that was raised once, of whatever
cause. `process`: it ended, or was killed. `hang`: it stood still, or did not leave when told to.
`network`: a connection was lost, or ranks did not meet, and nobody's end explains it. `slow`: it
was slower than its peers by more than its replacement costs."""

Rung = Literal["retry", "meet again", "replace process", "replace node", "clear", "skip", "stop"]

HARDWARE: frozenset[Cause] = frozenset({"accelerator", "process", "node", "hang", "slow"})
"""Causes that count against the node they happened on. A lost connection does not: whoever reports
it, or has the lowest rank where all wait for each other, is not shown to be at fault."""

_ACCELERATOR = ("CUDA error", "AcceleratorError", "NCCL error", "cuDNN error", "ECC", "Xid")
"""What torch says of an accelerator that is broken or lost."""


SAME_SIGN_S = 60.0
"""Within which a sign of a node's GPUs and a worker lost there are one failure. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker that is lost, as the controller hears of it."""

    slot: int
    node: int
    worker: int
    how: str
    cause: Cause
    """As far as this loss alone tells."""

    crash: Crashed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the job asks for; fields of `recovery` in the job file."""

    max_restarts: int
    on_oom: Literal["stop", "refit"] = "stop"
    poison: Literal["stop", "skip"] = "stop"
    node_strikes: int = 3
    strike_window_s: float = 3600.0


@dataclass(slots=True)
class History:
    """The losses that still count."""

    crashes: list[tuple[int, Crashed]] = field(default_factory=list)
    """Worker and exception, since the run last made progress."""

    strikes: dict[int, list[float]] = field(default_factory=dict)
    """By node, when something happened there that may be the hardware's fault (monotonic)."""

    signs: dict[int, float] = field(default_factory=dict)
    """By node, when a sign of its GPUs was a strike and no loss has followed (monotonic)."""

    set_aside: set[int] = field(default_factory=set)
    """Nodes that get no rank while another one can take it."""

    failures: int = 0
    """In a row without progress between them."""

    repeats: dict[str, int] = field(default_factory=dict)
    """Failures in a row without progress, by exception, else by rank."""

    failed_at_step: int = -1
    """Last finished step at the last one; -1 before the first."""

    fell_to: int = -1
    """Latest step that the run fell back to: it lost finished steps."""

    fell_from: int = -1
    """Furthest step from which it fell back to that one."""

    falls: int = 0
    """Falls in a row that began no further and ended no further than one before."""

    poison: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Steps that are left out, and the samples on whose account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a loss means, and what is to be done."""

    cause: Cause
    rung: Rung
    reason: str | None = None
    """Why the run stops, where it does."""

    exit_code: int = RunError.exit_code
    """Exit code of the command, should this end the run."""

    strikes: int = 0
    """Strikes of a node that is set aside by this loss; 0 for none."""


def judge(
    history: History,
    loss: Loss,
    rules: Rules,
    *,
    reached: int,
    now_s: float,
    resumed_at: int | None = None,
    advanced: bool = True,
    state_lives: bool = False,
) -> Verdict:
    """What to do about the first loss of a failure; it is added to the history.

    A restart makes progress when the run finishes a step after it and does not fail at the step at
    which it failed before. A run that fell back to an old checkpoint so makes progress long before
    it is where it was; one that comes to the same step each time and fails there makes none.
    Neither does one that falls back to the same checkpoint each time, from no further than before.

    Args:
        reached: Last step that the run has finished, as far as anybody knows.
        resumed_at: Step that the last restart resumed from; None before the first.
        advanced: Whether a step was finished since the last restart.
        state_lives: Whether processes that live hold a whole state together.
    """
    crash = loss.crash
    blame = f"rank {loss.slot}: {loss.how}"
    exit_code = crash.exit_code if crash is not None else RunError.exit_code
    if crash is not None and not crash.retry:
        return Verdict(cause="program", rung="stop", reason=blame, exit_code=exit_code)
    if rules.on_oom == "refit" and loss.cause == "out of memory":  # it resumes in another layout
        return Verdict(cause=loss.cause, rung="stop", reason=blame, exit_code=exit_code)
    if crash is not None and reached == 0 and history.failures == 0:
        reason = f"{blame} (before its first step)"
        return Verdict(cause=loss.cause, rung="stop", reason=reason, exit_code=exit_code)
    if resumed_at is not None and resumed_at < history.failed_at_step:
        _note_fall(history, history.failed_at_step, resumed_at)
    if advanced and reached != history.failed_at_step:
        history.failures = 0
        history.repeats.clear()
        history.crashes.clear()
    history.failures += 1
    alike = crash.kind if crash is not None else f"rank {loss.slot}"
    history.repeats[alike] = history.repeats.get(alike, 0) + 1
    history.failed_at_step = reached
    if reached > history.fell_from:  # the fall to come is from further than any before
        history.falls = 0
    again = crash is not None and any(other.kind == crash.kind for _, other in history.crashes)
    cause = note(history, loss)
    poison = _poison(history, loss) if cause == "data or software" else None
    if poison is not None and poison.samples and poison.step is not None:
        if rules.poison == "skip" and poison.step not in history.poison:
            history.poison[poison.step] = tuple(poison.samples)
            return Verdict(cause=cause, rung="skip")
        return Verdict(
            cause=cause,
            rung="stop",
            reason=f"{blame}; step {poison.step} raised it on two processes: a poison batch, "
            f"sample ids {_ids(poison.samples)}",
            exit_code=CrashLoop.exit_code,
        )
    num_tried = _num_tried(history)
    if num_tried > rules.max_restarts:
        tried = history.failures - 1
        return Verdict(
            cause=cause,
            rung="stop",
            reason=_loop(history, blame, crash, tried, reached),
            exit_code=CrashLoop.exit_code if rules.max_restarts else exit_code,
        )
    is_known = now_s - history.signs.pop(loss.node, -math.inf) < SAME_SIGN_S
    strikes = 0
    if cause in HARDWARE and not is_known:
        strikes = _strike(history, loss.node, rules, now_s)
    return Verdict(
        cause=cause,
        rung=_rung(history, cause, crash, rules, again=again, strikes=strikes, lives=state_lives),
        exit_code=exit_code,
        strikes=strikes,
    )


def sign(history: History, node: int, rules: Rules, now_s: float) -> int:
    """How often the node was struck, when a sign that its accelerator fails sets it aside;
    otherwise 0. It is the strike of a loss with the cause `accelerator`. Signs that come together,
    such as an Xid and a counter, are one, and so is a worker that is lost soon after."""
    if now_s - max(history.strikes.get(node, []), default=-math.inf) < SAME_SIGN_S:
        return 0
    history.signs[node] = now_s
    return _strike(history, node, rules, now_s)


def note_repair(history: History, rules: Rules, *, step: int, back_to: int) -> str | None:
    """Why the run stops, if it does: its state was found wrong after a step, all ranks went back
    to an earlier one, and that has happened too often without progress between."""
    _note_fall(history, step, back_to)
    if history.falls <= max(1, rules.max_restarts):
        return None
    return f"the state was found wrong after step {step}; {_falls(history)}"


def note(history: History, loss: Loss) -> Cause:
    """The cause of one more loss of the same failure, which is added to the history."""
    crash = loss.crash
    if crash is None or loss.cause != "exception":
        return loss.cause
    history.crashes.append((loss.worker, crash))
    return "data or software" if _poison(history, loss) is not None else "exception"


def how_it_ended(returncode: int, *, out_of_memory: bool) -> str:
    """What a process's exit alone tells.

    Args:
        returncode: As in `subprocess`: negative is the signal.

    >>> how_it_ended(-9, out_of_memory=True)
    'out of memory: killed by SIGKILL'
    >>> how_it_ended(-40, out_of_memory=False), how_it_ended(1, out_of_memory=False)
    ('killed by signal 40', 'exited with 1')
    """
    if returncode >= 0:
        return f"exited with {returncode}"
    why = "out of memory: " if out_of_memory else ""
    try:
        return f"{why}killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"{why}killed by signal {-returncode}"


def cause_of(text: str) -> Cause:
    """What an exception alone tells.

    >>> cause_of("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory")
    'out of memory'
    >>> cause_of("ZeroDivisionError: division by zero")
    'exception'
    """
    if names_want_of_memory(text):
        return "out of memory"
    if names_lost_peer(text):
        return "network"
    if any(words in text for words in _ACCELERATOR):
        return "accelerator"
    return "exception"


def _poison(history: History, loss: Loss) -> Crashed | None:
    """An exception of this kind in this step that two processes raised for the same samples."""
    mine = loss.crash
    assert mine is not None
    raised: dict[tuple[int, ...], int] = {}
    for worker, other in history.crashes:
        if mine.step is None or (other.kind, other.step) != (mine.kind, mine.step):
            continue
        if raised.setdefault(tuple(other.samples), worker) != worker:
            return other
    return None


def _strike(history: History, node: int, rules: Rules, now_s: float) -> int:
    """How often the node was struck, when that sets it aside now; otherwise 0."""
    recent = [at for at in history.strikes.get(node, []) if now_s - at <= rules.strike_window_s]
    history.strikes[node] = [*recent, now_s]
    if len(recent) + 1 < rules.node_strikes or node in history.set_aside:
        return 0
    history.set_aside.add(node)
    return len(recent) + 1


def _rung(
    history: History,
    cause: Cause,
    crash: Crashed | None,
    rules: Rules,
    *,
    again: bool,
    strikes: int,
    lives: bool,
) -> Rung:
    if not lives and _num_tried(history) == rules.max_restarts > 1:
        return "clear"  # an only restart stays a gentle one
    if strikes:
        return "replace node"
    if crash is not None and crash.parks and not again:
        return "retry"
    return "meet again" if cause == "network" else "replace process"


_OTHERS = 4
"""Losses that have nothing in common, for one of the same: machines fail independently, and at
12,000 nodes within the minutes of a recovery (`benchmarks/simulate_validation.py`). A guess."""


def _note_fall(history: History, step: int, to: int) -> None:
    is_further = to > history.fell_to or step > history.fell_from
    history.falls = 1 if is_further else history.falls + 1
    history.fell_to = max(history.fell_to, to)
    history.fell_from = max(history.fell_from, step)


def _num_tried(history: History) -> int:
    """Attempts that count towards the end: losses that repeat one, or very many that do not, and
    restarts that fell back to where one had begun before."""
    repeats = max(history.repeats.values(), default=0)
    return max(repeats, history.failures // _OTHERS, history.falls)


def _loop(history: History, blame: str, crash: Crashed | None, tried: int, reached: int) -> str:
    which = f"; sample ids {_ids(crash.samples)}" if crash is not None and crash.samples else ""
    tries = f"{counted(tried, 'restart')} in a row made no progress"
    if history.falls > tried:
        tries = _falls(history)
    return f"{blame}; {tries}, last finished step {reached}{which}"


def _falls(history: History) -> str:
    return (
        f"the run fell back {history.falls} times to step {history.fell_to} or before it, from "
        f"step {history.fell_from} or before it"
    )


def _ids(samples: Iterable[int]) -> str:
    return ", ".join(map(str, samples))
