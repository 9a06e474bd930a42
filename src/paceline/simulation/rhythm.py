"""Steps and checkpoints when nothing fails, worked out without walking through them."""

from dataclasses import dataclass

from paceline.simulation.goodput import Ledger, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How training goes on when nothing fails."""

    step_s: float
    """Fault-free, without any cost of being able to recover."""

    slower_s: float = 0.0
    """What each step takes longer for the sake of recovery."""

    slower_as: Part = "degraded"
    """What that counts as."""

    save_every: int | None = None
    """Steps between two checkpoints."""

    save_s: float = 0.0
    """Training stands still for one."""

    write_s: float = 0.0
    """It is written on in the background."""

    @property
    def whole_step_s(self) -> float:
        """Seconds of a step, saves left out."""
        return self.step_s + self.slower_s


@dataclass(frozen=True, slots=True)
class Stretch:
    """What came of a time of undisturbed training."""

    steps: int
    """Finished."""

    stall_s: float
    partial_s: float
    """Spent in a step that was not finished."""

    committed: int | None
    """Step of the newest checkpoint that was started and written in this stretch."""

    def enter(self, ledger: Ledger, rhythm: Rhythm) -> None:
        """Account for it; what was not finished is repeated."""
        ledger.add("useful", self.steps * rhythm.step_s)
        ledger.add(rhythm.slower_as, self.steps * rhythm.slower_s)
        ledger.add("stall", self.stall_s)
        ledger.add("recompute", self.partial_s)


def train(rhythm: Rhythm, after_step: int, seconds: float) -> Stretch:
    """What comes of so many seconds of training that begin after a step.

    >>> rhythm = Rhythm(step_s=10.0, save_every=3, save_s=5.0)
    >>> train(rhythm, 0, 42.0)
    Stretch(steps=3, stall_s=5.0, partial_s=7.0, committed=3)
    """
    step_s = rhythm.whole_step_s
    if rhythm.save_every is None:
        steps = int(seconds / step_s)
        return Stretch(steps, 0.0, seconds - steps * step_s, None)
    every = rhythm.save_every
    first = every - after_step % every
    to_first_s = first * step_s
    if seconds <= to_first_s:
        steps = min(first, int(seconds / step_s))
        return Stretch(steps, 0.0, max(0.0, seconds - steps * step_s), None)
    cycle_s = rhythm.save_s + every * step_s
    cycles = int((seconds - to_first_s) / cycle_s)
    rest_s = max(0.0, seconds - to_first_s - cycles * cycle_s)
    stall_s = cycles * rhythm.save_s + min(rest_s, rhythm.save_s)
    in_steps_s = max(0.0, rest_s - rhythm.save_s)
    steps = min(every, int(in_steps_s / step_s))
    # A save counts when it is copied and written.
    written = int((seconds - to_first_s - rhythm.save_s - rhythm.write_s) // cycle_s)
    committed = None if written < 0 else after_step + first + written * every
    return Stretch(first + cycles * every + steps, stall_s, in_steps_s - steps * step_s, committed)
