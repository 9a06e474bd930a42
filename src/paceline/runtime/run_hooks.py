"""The hooks of a run's steps: its agent, its drills and its safekeeping."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.control.slots import Phase
from paceline.runtime.generation import Generation
from paceline.runtime.recovery.safekeeping import Safekeeping
from paceline.runtime.recovery.verdict import Verdict
from paceline.runtime.vote import Outcome, Wishes


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
