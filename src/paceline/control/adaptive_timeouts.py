"""How long a phase may take before it is called late, learned from how long it takes. Pure.

Two limits. At the first, `suspect_s`, a look is taken: a process that the kernel says is stopped
will not go on by itself and is fenced then. Whatever may only be slow (a long batch, a collection
of garbage, a file server) has until the second, `fence_s`.

Every phase has a history of its own, and each phase of a process's first step another one, so that
what is long by nature (compiling, saving, evaluating, the first step) neither is called late nor
makes the others patient. All ranks an agent sees share one history: they do the same work.

On an accelerator the phases of a step share one history, of whole steps: the host only launches a
forward and a backward pass, in milliseconds, and waits wherever it first needs a result. What can
take long in a forward pass there is the program's reading of its data, and that may take as long as
the program's own code between two steps.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from paceline.control.slots import Duration, Phase

WINDOW = 256
"""Durations kept of each phase. A guess: 32 steps of eight ranks, so that a run that becomes
slower for good is believed within that many."""

ENOUGH = 5
"""Durations from which a limit is computed; before, the phase has `UNKNOWN_S`. A guess."""

SPREADS = 20.0
"""Median absolute deviations above the median at which a phase is suspect. With normal noise that
is 13 standard deviations; the tails of loaded machines are why it is not 3 (measured:
benchmarks/detector_false_alarms.py)."""

TIMES_USUAL = 12.0
"""A phase that is not known to be stopped may take this many times what 95 in 100 take at most: a
step ten times as long as the others is slow, not stuck (row 32 of the fault matrix, with a fifth to
spare). Of the median it was too little on a loaded machine: 21 false fences in 2.9 million phases,
most of steps made ten times as long that were twice the median before."""

TIMES_LONGEST = 2.0
"""... and this many times the longest that was seen: the median absolute deviation does not see a
rare long case, such as every fiftieth step. A guess."""

FORGET = 0.9999
"""What the longest is multiplied with for each new duration: half of it is forgotten after 6,931. A
guess: a rare case of a loaded machine is remembered for an hour of steps, not for a month."""

SUSPECT_SHARE = 0.5
"""Share of the floor, for a process that the kernel says is stopped: it cannot only be slow. A
guess; what is stopped for less, by a debugger or a scheduler, is let be."""

TIMES_RARE = 10.0
"""Saving, loading and evaluating may take this many times the suspect limit: they are seen seldom,
and a file server's bad hour looks like nothing before. A guess."""

RELEARN_EVERY = 16
"""New durations after which a limit is computed again: sorting 256 numbers for each phase of each
rank would cost more than it tells."""

UNKNOWN_S: dict[Phase, float] = {
    Phase.STARTING: 300.0,
    Phase.IMPORTING: 300.0,
    Phase.BUILDING: 1800.0,
    Phase.RESTORING: 1800.0,
    Phase.COMPILING: 1800.0,
    Phase.SAVE: 1800.0,
    Phase.EVALUATE: 1800.0,
    Phase.ENDING: 1800.0,
}
"""Patience with what has not been seen often enough, where the floor is `USUAL_FLOOR_S`; another
floor makes all of it longer or shorter. Guesses: a slow file server's import of torch, a large
model's build or load, half an hour, which is torch's own time-out of a collective."""

USUAL_FLOOR_S = 10.0
"""The job's default, `recovery.patience`."""

FEW_SHARE = 0.1
"""Share of `UNKNOWN_S`, for a phase of a step that has been seen, but not often enough, if
`TIMES_USUAL` times the longest of it is no more; for others it is the next one. Guesses: what took
a second in the first step does not take half a minute in the second."""

FEW_RARE_SHARE = 0.25

UNKNOWN_STEP_S = 300.0
"""Limit for phases of a step that were not seen before. A guess: the first step of a large model
warms up its communicators and its kernels."""


MEET_S = 60.0
"""How long two ranks may take to meet. A guess: it takes a tenth of a second here."""

_MEET_S_PER_RANK = 0.02
"""Added for each rank. Meta report 200 s for NCCL's cold start at 16 thousand ranks, 300 s at 22,
600 s at 64 and 900 s at 98 (arXiv:2602.00277), 9 to 14 ms a rank; this and the constant part leave
at least two thirds over each."""


TIMES_MEETING = 2.0
"""Times that limit, after which an agent calls a worker late that is still meeting. A guess: the
controller's own rule comes first, as it knows who is missing."""


def meet_limit_s(num_ranks: int, at_least_s: float = MEET_S) -> float:
    """How long this many ranks may take to meet: each more asks for its own time, as all meet in
    one store and connect to each other.

    >>> round(meet_limit_s(16384))
    388
    """
    return at_least_s + _MEET_S_PER_RANK * num_ranks


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds in one phase, without a change of place."""

    suspect_s: float
    fence_s: float


class Patience:
    """What has been learned. Memory is bounded by `WINDOW` numbers for each phase."""

    def __init__(self, *, floor_s: float, num_ranks: int = 1, on_accelerator: bool = False) -> None:
        """Args:
        floor_s: Whatever may only be slow has at least this long; what is stopped, half of it.
        num_ranks: As many meet.
        on_accelerator: Whether the host runs ahead of what it has launched.
        """
        self._floor_s = floor_s
        self._on_accelerator = on_accelerator
        self._steps: dict[int, _Step] = {}
        self._unknown_s = UNKNOWN_S | {Phase.JOINING: TIMES_MEETING * meet_limit_s(num_ranks)}
        self._histories: dict[tuple[Phase, bool], _History] = {}

    def learn(self, durations: Iterable[Duration], worker: int = 0) -> None:
        """Take note of phases that have ended by themselves, of one worker."""
        for one in durations:
            if self._on_accelerator and one.phase.is_of_step:
                whole_step = self._steps.setdefault(worker, _Step()).add(one)
                if whole_step is not None:
                    self._history(whole_step).add(whole_step.seconds)
            else:
                self._history(one).add(one.seconds)

    def _history(self, one: Duration) -> "_History":
        return self._histories.setdefault(self._key(one.phase, one.is_first_step), _History())

    def forget(self, worker: int) -> None:
        """It has ended, perhaps inside a step."""
        self._steps.pop(worker, None)

    def _key(self, phase: Phase, is_first_step: bool) -> tuple[Phase, bool]:
        """On an accelerator, that of the vote is of whole steps."""
        if self._on_accelerator and phase.is_of_step:
            phase = Phase.VOTE
        return phase, is_first_step and phase.is_of_step

    def limits(self, phase: Phase, *, is_first_step: bool = False) -> Limits:
        """How long this phase may take now.

        >>> patience = Patience(floor_s=10.0)
        >>> forward = [Duration(Phase.FORWARD, False, s) for s in (0.75, 1, 1, 1.25, 1.25)]
        >>> patience.limits(Phase.FORWARD).suspect_s
        300.0
        >>> patience.learn(forward)
        >>> patience.limits(Phase.FORWARD)
        Limits(suspect_s=6.0, fence_s=15.0)
        """
        if phase is Phase.PARKED:  # it waits for orders, not for itself
            return Limits(float("inf"), float("inf"))
        usual_s = self._unknown_s.get(phase, UNKNOWN_STEP_S)
        unknown_s = max(self._floor_s, usual_s * self._floor_s / USUAL_FLOOR_S)
        history = self._histories.get(self._key(phase, is_first_step))
        if history is None or history.num_seen < ENOUGH:
            few_s = self._few_s(phase, unknown_s)
            return Limits(few_s, few_s)
        learned_s = history.middle_s + SPREADS * history.spread_s
        suspect_s = max(SUSPECT_SHARE * self._floor_s, learned_s)
        fence_s = max(
            self._floor_s,
            learned_s,
            TIMES_USUAL * history.usual_s,
            TIMES_LONGEST * history.longest_s,
        )
        # The program's own code may do anything now and then.
        if phase is Phase.BOUNDARY or (self._on_accelerator and phase is Phase.FORWARD):
            fence_s = max(fence_s, unknown_s)
        elif not phase.is_of_step:  # rare, and it grows with the files: far less sure
            fence_s = max(fence_s, min(unknown_s, TIMES_RARE * suspect_s))
        return Limits(suspect_s, fence_s)

    def _few_s(self, phase: Phase, unknown_s: float) -> float:
        """For a phase that has not been seen often enough, in first steps or in others."""
        seen = [self._histories.get(self._key(phase, first)) for first in (True, False)]
        longest_s = max((one.longest_s for one in seen if one is not None), default=None)
        if longest_s is None:
            return unknown_s
        share = FEW_SHARE if phase.is_of_step else FEW_RARE_SHARE
        return max(self._floor_s, min(unknown_s, max(share * unknown_s, TIMES_USUAL * longest_s)))


class _Step:
    """The phases of one worker's step in work."""

    def __init__(self) -> None:
        self._last = Phase.BOUNDARY
        self._seconds = 0.0
        self._is_first_step = False

    def add(self, phase: Duration) -> Duration | None:
        """The step before, when this phase is the first of another one.

        Micro-batches go from the backward pass to the next forward pass; a step begins with a
        forward pass after anything else.
        """
        whole = None
        is_next = phase.phase is Phase.FORWARD and self._last > Phase.BACKWARD
        if is_next and self._seconds:
            whole = Duration(Phase.VOTE, self._is_first_step, self._seconds)
        if is_next:
            self._seconds, self._is_first_step = 0.0, phase.is_first_step
        self._last = phase.phase
        self._seconds += phase.seconds
        return whole


class _History:
    """The last durations of one phase, and what was made of them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._new = 0
        self.num_seen = 0
        self.middle_s = self.spread_s = self.usual_s = self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        self.longest_s = max(seconds, FORGET * self.longest_s)
        self.num_seen += 1
        self._new += 1
        if self.num_seen <= RELEARN_EVERY or self._new >= RELEARN_EVERY:
            self._new = 0
            self.middle_s = median(self._recent)
            ordered = sorted(self._recent)
            self.usual_s = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
            self.spread_s = median(abs(one - self.middle_s) for one in self._recent)
