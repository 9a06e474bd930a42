"""What surrounds the steps: nothing, or a run with its agent, its drills and its safekeeping.

A step computes, votes and updates by itself. At the points named here it tells its hooks where it
is, and asks them for what it cannot know. Code that only trains (`verify`, `bench`) has `NO_HOOKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.control.slots import Phase
from paceline.runtime.vote import Outcome, Wishes

if TYPE_CHECKING:
    from paceline.runtime.generation import Generation
    from paceline.runtime.recovery.safekeeping import Safekeeping
    from paceline.runtime.recovery.verdict import Verdict


class Hooks(Protocol):
    """Called by a step, in the order in which they stand here."""

    def enter(self, phase: Phase, micro_batch: int = 0) -> None:
        """The step goes on to this phase."""

    def pass_by(self, point: str, step: int) -> set[str]:
        """A drill's faults may happen here; returns the kinds of those that did."""

    def see(self, samples: Sequence[int]) -> None:
        """A micro-batch of these samples is about to be computed."""

    def wishes(self) -> Wishes:
        """What this rank was asked for since the last step."""

    def fingerprint(self) -> Tensor | None:
        """Numbers for the vote that compare the ranks' states; None where no comparison is due."""

    def settle(self, device: torch.device) -> None:
        """Wait for the device; raise unless all that it was to receive until now has come."""

    def judge(self, fingerprints: Sequence[float]) -> Verdict | None:
        """Whose state before this step is wrong; None where all is well."""

    def decided(self, outcome: Outcome) -> None:
        """All ranks agree, and this rank knows it; nothing is changed yet."""

    def updating(self) -> None:
        """From now on the state is of no step."""

    def updated(self, step: int) -> None:
        """The state is this step's."""

    def step_done(self) -> float | None:
        """Seconds of the step in which this rank's CPU was not waiting; None where unknown."""

    def after_update(self, step: int, seconds: float) -> None:
        """The step is over, after so many seconds."""


class NoHooks:
    """Nothing around the steps."""

    def enter(self, phase: Phase, micro_batch: int = 0) -> None:
        pass

    def pass_by(self, point: str, step: int) -> set[str]:
        return set()

    def see(self, samples: Sequence[int]) -> None:
        pass

    def wishes(self) -> Wishes:
        return Wishes()

    def fingerprint(self) -> Tensor | None:
        return None

    def settle(self, device: torch.device) -> None:
        pass  # reading a number waits, and nobody interrupts

    def judge(self, fingerprints: Sequence[float]) -> Verdict | None:
        return None

    def decided(self, outcome: Outcome) -> None:
        pass

    def updating(self) -> None:
        pass

    def updated(self, step: int) -> None:
        pass

    def step_done(self) -> float | None:
        return None

    def after_update(self, step: int, seconds: float) -> None:
        pass


NO_HOOKS = NoHooks()


class RunHooks:
    """A run: its agent sees each phase, drills happen, and the state is compared and kept."""

    def __init__(self, here: Generation, safekeeping: Safekeeping) -> None:
        self._here = here
        self._safekeeping = safekeeping

    def enter(self, phase: Phase, micro_batch: int = 0) -> None:
        self._here.progress.enter(phase, micro_batch)

    def pass_by(self, point: str, step: int) -> set[str]:
        return self._here.faults.pass_by(point, step)

    def see(self, samples: Sequence[int]) -> None:
        self._here.faults.see(samples)

    def wishes(self) -> Wishes:
        here, state = self._here, self._here.state
        state.stop_wanted |= here.line.stop_wanted
        order = here.line.regroup_wanted
        save = here.line.save_wanted or (order is not None and order.save)
        return Wishes(state.stop_wanted, order is not None, save)

    def fingerprint(self) -> Tensor | None:
        return self._safekeeping.ballot()

    def settle(self, device: torch.device) -> None:
        self._here.member.settle(device)

    def judge(self, fingerprints: Sequence[float]) -> Verdict | None:
        return self._safekeeping.judge(fingerprints)

    def decided(self, outcome: Outcome) -> None:
        self._here.held.decided = outcome
        if outcome.refused is not None:
            self._safekeeping.suspect(outcome.step)
        self._safekeeping.before_update()

    def updating(self) -> None:
        self._here.held.is_torn = True

    def updated(self, step: int) -> None:
        self._here.state.last_step = step
        self._here.held.is_torn = False

    def step_done(self) -> float | None:
        return self._here.progress.step_done()

    def after_update(self, step: int, seconds: float) -> None:
        self._safekeeping.after_update(step, seconds)
