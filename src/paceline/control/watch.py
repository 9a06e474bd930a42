"""Which way a worker that makes no progress is stuck: pure, from what was seen of it.

    stopped     SIGSTOP, or frozen: nothing in it runs
    gil held    it runs, but nobody else gets the interpreter: inside one long call into C
    looping     the interpreter turns, the training thread burns a core and gets nowhere
    waiting     the interpreter turns, the training thread sleeps: a lock, a file, or other ranks

`dead` is not here: the agent is told of that by the kernel at once.
"""

from collections import deque
from dataclasses import dataclass

from paceline.control.kernel import ProcessTimes
from paceline.control.messages import Kind
from paceline.control.slots import Reading

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


@dataclass(frozen=True, slots=True)
class Sight:
    """What can be said of a worker now."""

    waited_s: float
    """Seconds without a change of place that were watched."""

    kind: Kind
    is_certain: bool
    """Whether the kernel itself says that it is stopped, so that it cannot only be slow."""


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

    def examine(self, reading: Reading, times: ProcessTimes | None) -> Sight:
        """Which way it is stuck, as far as one look and those before it can tell."""
        if times is None:
            return Sight(self._waited_s, "waiting", is_certain=False)
        self._times.append(times)
        while len(self._times) > 2 and times.at_ns - self._times[1].at_ns > LOOKBACK_S * 1e9:
            self._times.popleft()
        kind = classify(reading, self._times[0], times)
        is_certain = kind == "stopped" and times.process.state == "T"
        return Sight(self._waited_s, kind, is_certain)


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
