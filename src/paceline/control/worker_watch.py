"""The agent's watch over its workers: who is late, which way it is stuck, and its tracebacks.

    stopped     SIGSTOP, or frozen: nothing in it runs
    gil held    it runs, but nobody else gets the interpreter: inside one long call into C
    looping     the interpreter turns, the training thread burns a core and gets nowhere
    waiting     the interpreter turns, the training thread sleeps: a lock, a file, or other ranks

`dead` is not here: the agent is told of that by the kernel at once. Reads every slot ten times a
second, and /proc only of a worker that has stood still for a while. What it sees it returns; whom
to blame is the controller's decision, which sees all nodes.
"""

import asyncio
import math
import os
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from paceline.control.adaptive_timeouts import Patience
from paceline.control.kernel import ProcessTimes, is_stopped, process_times, where_it_waits
from paceline.control.messages import Kind, Seen
from paceline.control.slots import STACKS_SIGNAL, Phase, Reading, SlotFile

LOOK_EVERY_S = 0.1
"""Between two looks at the slots. Costs 20 microseconds for each worker; how late a stuck worker is
noticed beyond its limit."""

EXAMINE_FROM_S = 0.5
"""A worker that has stood still this long is looked at in /proc too. A guess, below every limit."""

REPEAT_S = 1.0
"""A worker that stays late is reported again after this long: the controller may have had to wait
for what it now has."""

STACKS_WAIT_S = 0.3
"""How long tracebacks may take; they come within milliseconds unless the worker is stopped."""

STACKS_CHARS = 12_000
"""Longest tracebacks of one worker in a report; the end is kept, where the training thread is."""

STALE_LIVENESS_S = 1.0
"""Ten ticks missed. A guess, above what a busy machine of ours makes a tick late (0.3 s)."""

BURNING = 0.5
"""Share of the time in which a thread must run, or want to, to count as running. A guess: one that
waits does for below 0.05 here, one that loops always."""

FEW_SWITCHES = 3
"""A thread that waits for the interpreter gives up its core every switch interval (5 ms), so some
hundred times in the time between two looks. Nothing frozen does."""

LOOKBACK_S = 1.0
"""Over how long times are compared."""

MOST_UNSEEN_S = 1.0
"""Time between two looks that counts at most. What the watcher did not see, it cannot call
waiting: an agent that was stopped itself blames nobody when it goes on."""


class Watch:
    """One worker under watch. Feed it looks; times are the monotonic clock's."""

    def __init__(self) -> None:
        self._progress = -1
        self._waited_s = 0.0
        self._looked_ns = 0
        self._times: deque[ProcessTimes] = deque()

    def look(self, reading: Reading, *, at_ns: int) -> float:
        """Take note of a slot; returns the seconds without a change of place that were watched."""
        if reading.progress != self._progress:
            self._progress, self._waited_s = reading.progress, 0.0
            self._times.clear()
        elif self._looked_ns:
            self._waited_s += min((at_ns - self._looked_ns) / 1e9, MOST_UNSEEN_S)
        self._looked_ns = at_ns
        return self._waited_s

    def examine(self, reading: Reading, times: ProcessTimes | None) -> tuple[Kind, bool]:
        """Which way it is stuck, as far as one look and those before it can tell; and whether the
        kernel itself says that it is stopped, so that it cannot only be slow."""
        if times is None:
            return "waiting", False
        self._times.append(times)
        while len(self._times) > 2 and times.at_ns - self._times[1].at_ns > LOOKBACK_S * 1e9:
            self._times.popleft()
        kind = classify(reading, self._times[0], times)
        return kind, kind == "stopped" and times.process.state == "T"


@dataclass(slots=True)
class _Watched:
    pid: int
    slot: SlotFile
    watch: Watch = field(default_factory=Watch)
    reported_at_s: float = 0.0
    place: tuple[Phase, int] = (Phase.STARTING, 0)
    """Phase and step at the last look."""


class Lookout:
    """All workers of one agent."""

    def __init__(self, *, floor_s: float, num_ranks: int = 1, on_accelerator: bool = False) -> None:
        self._patience = Patience(
            floor_s=floor_s, num_ranks=num_ranks, on_accelerator=on_accelerator
        )
        self._watched: dict[int, _Watched] = {}

    def add(self, worker: int, pid: int, slot: SlotFile) -> None:
        """Watch this worker from now on; its slot is closed when it is dropped."""
        self._watched[worker] = _Watched(pid, slot)

    def drop(self, worker: int) -> None:
        watched = self._watched.pop(worker, None)
        if watched is not None:
            watched.slot.close()
            self._patience.forget(worker)

    def close(self) -> None:
        for worker in list(self._watched):
            self.drop(worker)

    def late(self) -> list[Seen]:
        """Look at every worker once; those beyond their limits that are due to be reported."""
        found = []
        now_s = time.monotonic()
        for worker, watched in self._watched.items():
            self._patience.learn(watched.slot.take_durations(), worker)
            seen = self._look(worker, watched)
            if seen.is_late and now_s >= watched.reported_at_s + REPEAT_S:
                watched.reported_at_s = now_s
                found.append(seen)
        return found

    def places(self) -> dict[int, tuple[Phase, int]]:
        """Phase and step of every worker at the last look; may be called in any thread."""
        return {worker: watched.place for worker, watched in list(self._watched.items())}

    async def look_closer(self) -> list[Seen]:
        """What is to be seen of every worker now, with tracebacks; takes up to `STACKS_WAIT_S`."""
        chosen = list(self._watched)
        # First, for the signal ends the system call that somebody may be stuck in.
        before = {w: self._look(w, self._watched[w], examine=True) for w in chosen}
        asked = {worker for worker in chosen if self._ask_for_stacks(worker)}
        deadline = time.monotonic() + STACKS_WAIT_S
        lengths: dict[int, int] = {}
        while asked and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            for worker in list(asked):
                watched = self._watched.get(worker)
                length = watched.slot.num_stack_bytes() if watched is not None else 0
                # Complete when it has not grown since the last look.
                if watched is None or (length and lengths.get(worker) == length):
                    asked.discard(worker)
                lengths[worker] = length
        found = []
        for worker in chosen:
            watched = self._watched.get(worker)
            if watched is not None:
                now = self._look(worker, watched)
                has_moved = now.waited_s <= before[worker].waited_s
                found.append(_with_stacks(now if has_moved else before[worker], watched))
        return found

    def _look(self, worker: int, watched: _Watched, *, examine: bool = False) -> Seen:
        at_ns = time.monotonic_ns()
        reading = watched.slot.read()
        watched.place = reading.phase, reading.step
        waited_s = watched.watch.look(reading, at_ns=at_ns)
        limits = self._patience.limits(reading.phase, is_first_step=reading.is_first_step)
        kind: Kind = "waiting"
        is_certain = False
        if waited_s >= EXAMINE_FROM_S or examine:
            times = process_times(
                watched.pid,
                training_thread=reading.training_thread,
                liveness_thread=reading.liveness_thread,
                at_ns=at_ns,
            )
            kind, is_certain = watched.watch.examine(reading, times)
        limit_s = limits.suspect_s if is_certain else limits.fence_s
        return Seen(
            worker=worker,
            generation=reading.generation,
            kind=kind,
            is_certain=is_certain,
            phase=reading.phase,
            step=reading.step,
            micro_batch=reading.micro_batch,
            waited_s=waited_s,
            limit_s=limit_s if math.isfinite(limit_s) else None,
            is_late=waited_s > limit_s,
        )

    def _ask_for_stacks(self, worker: int) -> bool:
        watched = self._watched[worker]
        watched.slot.clear_stacks()
        # Before its handler is in place the signal would end it; while it is stopped nothing comes.
        if not watched.slot.read().stacks_ready or is_stopped(watched.pid):
            return False
        try:
            os.kill(watched.pid, STACKS_SIGNAL)
        except ProcessLookupError:
            return False
        return True


def _with_stacks(seen: Seen, watched: _Watched) -> Seen:
    stacks = watched.slot.stacks().strip()
    waits = where_it_waits(watched.pid)
    text = (f"{waits}\n{stacks}" if waits else stacks)[-STACKS_CHARS:]
    return msgspec.structs.replace(seen, stacks=text, in_collective=ends_in_collective(text))


def where(phase: Phase, step: int) -> str:
    """Where a worker is, in words: `forward of step 7`."""
    return f"{phase.words} of step {step}" if phase.is_of_step else phase.words


def ends_in_collective(stacks: str) -> bool | None:
    """Whether the training thread's traceback, as faulthandler writes it, ends in a collective.

    The main thread comes last and newest frame first. A backward pass that waits in C++ has
    autograd's frame on top: DDP reduces from there. None when there is no such traceback.

    >>> ends_in_collective('Thread 0x1 (most recent call first):\\n  File "a.py", line 1 in tick\\n'
    ...     'Current thread 0x2 (most recent call first):\\n'
    ...     '  File ".../torch/distributed/distributed_c10d.py", line 3 in all_reduce\\n')
    True
    """
    _, found, newest = stacks.rpartition("(most recent call first):")
    if not found:
        return None
    for line in newest.splitlines():
        if line.strip().startswith("File "):
            return any(part in line for part in _COLLECTIVE_FRAMES)
    return None


_COLLECTIVE_FRAMES = ("torch/distributed/", "torch/autograd/")


def classify(reading: Reading, before: ProcessTimes, now: ProcessTimes) -> Kind:
    """The kind, from two looks at the process that lie some tenths of a second apart."""
    if now.process.state in "Tt":
        return "stopped"
    if reading.liveness_ns and (now.at_ns - reading.liveness_ns) / 1e9 > STALE_LIVENESS_S:
        wanted = _switches(before, now) > FEW_SWITCHES or _busy(before, now) > BURNING
        return "gil held" if wanted else "stopped"
    return "looping" if _busy(before, now) > BURNING else "waiting"


def _busy(before: ProcessTimes, now: ProcessTimes) -> float:
    """Share of the time in which the training thread ran or wanted to; the first if unknown."""
    passed_s = (now.at_ns - before.at_ns) / 1e9
    if passed_s <= 0:
        return 0.0
    if before.training is not None and now.training is not None:
        return (now.training.runnable_s - before.training.runnable_s) / passed_s
    return (now.process.runnable_s - before.process.runnable_s) / passed_s


def _switches(before: ProcessTimes, now: ProcessTimes) -> int:
    if before.liveness is None or now.liveness is None:
        return 0
    return now.liveness.switches - before.liveness.switches
