"""The agent's watch over its workers: who is late, which way it is stuck, and its tracebacks.

Reads every slot ten times a second, and /proc only of a worker that has stood still for a while.
What it finds it returns; whom to blame is the controller's decision, which sees all nodes.
"""

import asyncio
import os
import time
from dataclasses import dataclass, field

from paceline.control.blame import ends_in_collective
from paceline.control.kernel import is_stopped, process_times, where_it_waits
from paceline.control.patience import Limits, Patience
from paceline.control.slots import STACKS_SIGNAL, Reading, SlotFile
from paceline.control.watch import Sight, Watch

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


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of one worker."""

    worker: int
    reading: Reading
    sight: Sight
    limit_s: float
    is_late: bool
    stacks: str = ""

    @property
    def in_collective(self) -> bool | None:
        return ends_in_collective(self.stacks)


@dataclass(slots=True)
class _Watched:
    pid: int
    slot: SlotFile
    watch: Watch = field(default_factory=Watch)
    reported_at_s: float = 0.0


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
        """It has ended."""
        watched = self._watched.pop(worker, None)
        if watched is not None:
            watched.slot.close()
            self._patience.forget(worker)

    def close(self) -> None:
        """Drop all."""
        for worker in list(self._watched):
            self.drop(worker)

    def late(self) -> list[Finding]:
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

    async def look_closer(self, workers: list[int] | None = None) -> list[Finding]:
        """What is to be seen of these workers now (None: of all), with their tracebacks; takes up
        to `STACKS_WAIT_S`."""
        chosen = [w for w in self._watched if workers is None or w in workers]
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
                has_moved = now.reading.progress != before[worker].reading.progress
                found.append(_with_stacks(now if has_moved else before[worker], watched))
        return found

    def _look(self, worker: int, watched: _Watched, *, examine: bool = False) -> Finding:
        at_ns = time.monotonic_ns()
        reading = watched.slot.read()
        waited_s = watched.watch.look(reading, at_ns=at_ns)
        limits = self._patience.limits(reading.phase, is_first_step=reading.is_first_step)
        if waited_s < EXAMINE_FROM_S and not examine:
            sight = Sight(waited_s, "waiting", is_certain=False)
            return Finding(worker, reading, sight, limits.fence_s, is_late=False)
        times = process_times(
            watched.pid,
            training_thread=reading.training_thread,
            liveness_thread=reading.liveness_thread,
            at_ns=at_ns,
        )
        sight = watched.watch.examine(reading, times)
        limit_s = _limit(limits, sight)
        return Finding(worker, reading, sight, limit_s, is_late=waited_s > limit_s)

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


def _limit(limits: Limits, sight: Sight) -> float:
    return limits.suspect_s if sight.is_certain else limits.fence_s


def _with_stacks(seen: Finding, watched: _Watched) -> Finding:
    stacks = watched.slot.stacks().strip()
    waits = where_it_waits(watched.pid)
    text = f"{waits}\n{stacks}" if waits else stacks
    return Finding(
        seen.worker,
        seen.reading,
        seen.sight,
        seen.limit_s,
        seen.is_late,
        stacks=text[-STACKS_CHARS:],
    )


def where(reading: Reading) -> str:
    """Where a worker is, in words: `forward of step 7`."""
    phase = reading.phase.words
    return f"{phase} of step {reading.step}" if reading.phase.is_of_step else phase
