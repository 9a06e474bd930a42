"""Where a step's time goes on this rank, and the two places in a session that say so.

A session passes `faults` at the beginning of every forward and backward pass, of the vote and of
the update, and tells `channel` of every finished step. What stands there in a bench turns a clock.

On an accelerator the host runs ahead: with `waits`, each turn first waits until the device has done
what it was given, so that phases are the device's. That takes the host's lead away, so that the sum
of the phases is an upper bound of the step.
"""

import time
from collections.abc import Callable

import torch

from paceline.control import messages as say
from paceline.record.bench import PHASES
from paceline.runtime.channel import Channel
from paceline.runtime.faults import Faults


class Clock:
    """The phases of this step so far, and of all steps that were kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits = False
        self._phase = "bookkeeping"
        self._mark = self._start = time.perf_counter()
        self._spent = dict.fromkeys(PHASES, 0.0)
        self.step_s: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def enter(self, phase: str) -> str:
        """A phase begins; returns the one that it ends."""
        if self._waits:
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._spent[self._phase] += now - self._mark
        before, self._phase, self._mark = self._phase, phase, now
        return before

    def end_step(self, *, keep_step: bool, keep_phases: bool) -> None:
        """A step is over; the next one begins with bookkeeping."""
        self.enter("bookkeeping")
        if keep_step:
            self.step_s.append(self._mark - self._start)
        if keep_phases:
            for phase, seconds in self._spent.items():
                self.phases[phase].append(seconds)
        self.restart()

    def restart(self, *, waits: bool | None = None) -> None:
        """The next step begins now. `waits`: from now on, wait for the device at each turn."""
        self._waits = self._waits if waits is None else waits
        self._phase, self._spent = "bookkeeping", dict.fromkeys(PHASES, 0.0)
        self._mark = self._start = time.perf_counter()


_PHASE_OF = {
    "forward": "forward",
    "backward": "backward",
    "reduce": "agree",
    "vote": "agree",
    "apply": "optimizer",
}
"""From a session's places to phases; before and after a step (`restore`, `save`) is bookkeeping."""


class PhaseMarks(Faults):
    """Stands where a session's faults stand: told of every place as it is passed."""

    def __init__(self, clock: Clock, rank: int, channel: Channel) -> None:
        super().__init__(rank=rank, channel=channel)
        self._clock = clock

    def pass_by(self, phase: str, step: int) -> set[str]:
        """Nothing happens but that the clock turns."""
        self._clock.enter(_PHASE_OF.get(phase, "bookkeeping"))
        return set()


class Line:
    """Stands where a session's channel to its agent stands: told of every finished step."""

    stop_wanted = False
    regroup_wanted = None
    """Nobody stops, leaves or joins."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def send(self, message: say.FromWorker) -> None:
        """Everything but finished steps is of no use here."""
        if isinstance(message, say.StepDone):
            self._on_step()
