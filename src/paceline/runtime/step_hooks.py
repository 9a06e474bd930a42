"""What surrounds the steps: nothing, or a run (`run_hooks.py`).

A step computes, votes and updates by itself. At the points named here it tells its hooks where it
is, and asks them for what it cannot know. Code that only trains (`verify`, `bench`) has `NO_HOOKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.control.slots import Phase
from paceline.runtime.recovery.verdict import Verdict
from paceline.runtime.vote import Outcome, Wishes


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
