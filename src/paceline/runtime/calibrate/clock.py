"""Time one operation on every rank at once, within a budget that rank 0 keeps.

Every rank must make the same calls in the same order: they start together, and rank 0 decides for
all how often an operation is repeated and whether there is time for it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

_LEAST, _MOST = 5, 50
"""Repeats of one operation. Medians of fewer than 5 move with one late thread."""

_SLOW_LEAST = 2
"""Repeats of an operation so slow that five would take all of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call."""

    seconds: float
    spread: float
    num_repeats: int


class Clock:
    """Times operations on one device, in step with the other ranks."""

    def __init__(self, *, device: torch.device, seconds: float, rank: int) -> None:
        self._device = device
        self._rank = rank
        self._ends = [time.monotonic() + seconds]
        self._owes = False
        self.began = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds left of the part that is being measured, as rank 0 sees it."""
        return self.agreed(self._ends[-1] - time.monotonic())

    @contextmanager
    def part(self, name: str, seconds: float) -> Iterator[None]:
        """A part of the whole that may take so long; what it leaves is for the next ones. Its first
        operation is timed however little time there is: no part comes out empty."""
        now = time.monotonic()
        self._owes = True
        self._ends.append(min([now + seconds, *self._ends]))
        if self._rank == 0:
            left = max(self._ends[-1] - now, 0)
            print(f"calibrate: {name}, {left:.3g} s", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            self._ends.pop()

    def time(self, call: Callable[[], object], *, budget_s: float) -> Timing | None:
        """How long a call takes; None when there is no time left to find out.

        The first calls warm up caches, workspaces and clocks, and count for nothing.
        """
        if self.left_s <= 0 and not self._owes:
            return None
        call()  # the first one allocates, compiles and picks its kernel
        one = self.agreed(self._once(call))
        allowed = min(budget_s, self.left_s)
        if one * _SLOW_LEAST > allowed and not self._owes:
            return None
        self._owes = False
        fits = max(0, int(allowed / max(one, 1e-9)))
        repeats = min(_MOST, max(_LEAST if fits >= _LEAST else _SLOW_LEAST, fits))
        inner = self._inner(one)
        self._together()
        times = sorted(self._timed(call, inner) for _ in range(repeats))
        low, high = times[len(times) // 5], times[-1 - len(times) // 5]
        middle = median(times)
        return Timing(
            seconds=self.agreed(middle),
            spread=self.agreed((high - low) / middle),
            num_repeats=repeats,
        )

    def run_for(self, call: Callable[[], object], seconds: float, *, batch: int) -> list[float]:
        """Seconds of one call, for every `batch` of them, until the time is over."""
        times: list[float] = []
        end = time.monotonic() + seconds
        while self.agreed(end - time.monotonic()) > 0:
            times.append(self._timed(call, batch))
        return times

    def agreed(self, value: float) -> float:
        """Rank 0's value, on every rank; also where they wait for each other."""
        if not dist.is_initialized():
            return value
        told = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told.item())

    def _inner(self, one: float) -> int:
        """Calls timed as one: a single short kernel is lost in the events around it."""
        if self._device.type == "cpu" or one > _SHORT_S:
            return 1
        return min(100, max(1, int(_SHORT_S / max(one, 1e-7))))

    def _once(self, call: Callable[[], object]) -> float:
        self._together()
        return self._timed(call, 1)

    def _timed(self, call: Callable[[], object], count: int) -> float:
        if self._device.type == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - start) / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count

    def _together(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            self.agreed(0.0)


_SHORT_S = 1e-3
