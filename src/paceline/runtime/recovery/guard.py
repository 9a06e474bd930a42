"""A comparison of all ranks' parameters and optimizer state, carried by the vote of a step.

When a check is due, each rank puts its fingerprint into the vote that precedes the update, so that
every rank sees every rank's and all come to the same verdict, before a wrong number is applied and
without a collective of its own. Where a rank has less than two replicas, its fingerprint is also
taken right after the update before: nothing may write parameters between two updates.

Leaves out: saved buffers (batch norm's averages), which change while a step is computed; gradients,
which are wrong on all ranks once they are summed; what is done about a verdict (`repair.py`).
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.parallel.layout import Layout
from paceline.parallel.replicas import replicas_of
from paceline.runtime.recovery.fingerprint import Fingerprint, fingerprint
from paceline.runtime.recovery.live import BUFFERS, LiveState
from paceline.runtime.recovery.verdict import Verdict, judge

SHARE_OF_STEP = 0.003
"""Largest share of the step time that checks may cost when their interval is `auto`: a third of the
1 % that all of recovery may cost. Source: the bar of docs/recovery.md."""

_REAL_COST = 2
"""What a check adds to a run, over the seconds that it takes by itself with warm caches: 6.0 ms
(3.0 to 9.0, 95 %) and 2.8 ms on 2 CPU ranks, rounded. Source: `benchmarks/recovery_overhead.py`."""

LONGEST_EVERY = 100
"""Most steps between two checks when their interval is `auto`. A guess: as many steps as a
checkpoint is usually apart."""

_HALVES = 2**32
"""A fingerprint travels as two float64, which hold 32 bits each exactly."""


class Guard:
    """This rank's part in the comparisons."""

    def __init__(self, layout: Layout, rank: int, state: LiveState, device: torch.device) -> None:
        self.every = 0
        """Steps between two checks; 0 is never."""

        self.certified_step: int | None = None
        """The newest step whose state all ranks were found to agree on."""

        self.groups = replicas_of(layout)
        """Ranks that hold the same."""

        self._num_ranks = layout.num_ranks
        self._rank = rank
        self._state = state
        self._device = device
        self._watches_rest = len(self.groups[0]) < 3
        self._written: tuple[int, Fingerprint] | None = None
        self._latest: Fingerprint | None = None
        self._first: int | None = None
        self._also: set[int] = set()

    def is_due(self, state_step: int) -> bool:
        """Whether the state after a step is to be compared; every rank comes to the same answer.

        That of the first step asked about is: what was restored, before anything is built on it.
        """
        if self._first is None:
            self._first = state_step
        is_asked = state_step == self._first or state_step in self._also
        return self.every > 0 and (state_step % self.every == 0 or is_asked)

    def also(self, state_step: int) -> None:
        """Compare after this step too."""
        self._also = {step for step in self._also if step > (self.certified_step or 0)}
        self._also.add(state_step)

    def after_update(self, state_step: int) -> None:
        """Remember what the update wrote, when the state after this step will be compared."""
        self._written = None
        if self._watches_rest and self.is_due(state_step):
            self._written = state_step, self._take()

    def ballot(self, state_step: int) -> Tensor:
        """This rank's numbers for the vote, to be added to all other ranks': float64, on its
        device, where they are still being computed."""
        self._latest = self._take()
        numbers = torch.zeros(3, self._num_ranks, dtype=torch.float64, device=self._device)
        whole = self._latest.whole().to(self._device)
        numbers[0, self._rank] = (whole >> 32) & (_HALVES - 1)
        numbers[1, self._rank] = whole & (_HALVES - 1)
        if self._written is not None and self._written[0] != state_step:
            self._written = None
        if self._written is not None:
            numbers[2, self._rank] = (self._written[1].each != self._latest.each).any()
        return numbers.flatten()

    def verdict(self, state_step: int, totals: Sequence[float]) -> Verdict | None:
        """What the sums over all ranks say: None is that all is well, and certifies the step."""
        num = self._num_ranks
        values = [
            int(high) * _HALVES + int(low)
            for high, low in zip(totals[:num], totals[num : 2 * num], strict=True)
        ]
        moved = [flag > 0 for flag in totals[2 * num : 3 * num]]
        if num > 1 and all(moved):
            moved = [False] * num  # the program writes its parameters itself, on every rank
            self._watches_rest = False
        found = judge(self.groups, values, moved)
        if found is None:
            self.certified_step = state_step
        return found

    def evidence(self) -> tuple[dict[str, int], tuple[str, ...]]:
        """Each tensor's fingerprint at the last check, and the tensors that changed between the
        update and it. Waits for the accelerator."""
        assert self._latest is not None, "a check comes first"
        now = self._latest.by_name()
        before = now if self._written is None else self._written[1].by_name()
        return now, tuple(name for name in now if before.get(name) != now[name])

    def forget(self) -> None:
        """The state is about to be replaced."""
        self._written = self._latest = self._first = self.certified_step = None

    def cost_s(self) -> float:
        """Seconds that one check takes on this rank, measured now."""
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            int(self._take().whole())
            best = min(best, time.perf_counter() - start)
        return best * (2 if self._watches_rest else 1)

    def _take(self) -> Fingerprint:
        tensors = ((n, t) for n, t in self._state.tensors() if not n.startswith(BUFFERS))
        return fingerprint(tensors)


def interval(cost_s: float, step_s: float) -> int:
    """Steps between two checks so that they cost at most `SHARE_OF_STEP` of the time.

    >>> interval(0.001, 1.0), interval(0.001, 0.1), interval(1.0, 0.1)
    (1, 7, 100)
    """
    if step_s <= 0:
        return LONGEST_EVERY
    return max(1, min(LONGEST_EVERY, -int(-_REAL_COST * cost_s // (SHARE_OF_STEP * step_s))))
