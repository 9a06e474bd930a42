"""How long each part of a step takes: by the host's clock on a CPU, by the device's events on an
accelerator.

An accelerator's calls return at once, so the host's clock would show when work was launched.
Events stand in the stream between the parts. They are read when the host has waited for the vote
anyway, so the update's events are those of the step before: its own are still ahead in the stream.

Leaves out: what overlaps. A part's time runs from one event of the main stream to the next, and in
it are gaps in which the device waits for the host, and waits for collectives of other streams.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from paceline.parallel.layout import Layout
from paceline.runtime.devices import is_accelerator

Part = Literal["data", "forward", "backward", "vote", "apply"]
_Spent = dict[Part, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """Seconds of each part of one step on this rank; None is what was not measured."""

    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    vote_s: float | None = None
    apply_s: float | None = None
    """On an accelerator, that of the step before."""


class PhaseClock(Protocol):
    """Counts a step's time by its parts."""

    def begin(self) -> None:
        """A step begins, with its data."""

    def enter(self, part: Part) -> None:
        """The step goes on to this part."""

    def voted(self) -> None:
        """The host has the vote's outcome: it has waited for the device. Next is `apply`."""

    def resume(self) -> None:
        """A step that was interrupted after its vote goes on to its update now."""

    def end(self) -> PartTimes:
        """The step's parts."""


def make_clock(device: torch.device) -> PhaseClock:
    """The clock of this device."""
    return EventClock(torch.get_device_module(device)) if is_accelerator(device) else HostClock()


class HostClock:
    """By the host's clock: right where a call returns when its work is done."""

    def __init__(self) -> None:
        self._part: Part = "data"
        self._spent: _Spent = {}
        self._mark = 0.0

    def begin(self) -> None:
        self._spent, self._part = {}, "data"
        self._mark = time.perf_counter()

    def enter(self, part: Part) -> None:
        now = time.perf_counter()
        self._spent[self._part] = self._spent.get(self._part, 0.0) + now - self._mark
        self._part, self._mark = part, now

    def voted(self) -> None:
        self.enter("apply")

    def resume(self) -> None:
        self._part, self._mark = "apply", time.perf_counter()

    def end(self) -> PartTimes:
        self.enter("data")
        return _times(self._spent)


class EventClock:
    """By events of the accelerator's current stream."""

    def __init__(self, module: Any) -> None:
        """
        Args:
            module: The device's, as `torch.cuda`: it has `Event(enable_timing=True)`.
        """
        self._module = module
        self._marks: list[tuple[Part | None, Any]] = []
        """Part -> the event at its beginning, in the order of the stream. None ends a step."""

        self._times = PartTimes()

    def begin(self) -> None:
        self._times = PartTimes()
        if self._marks and self._marks[-1][0] is not None:  # of a step that did not end
            self._marks.clear()
        self._mark("data")

    def enter(self, part: Part) -> None:
        self._mark(part)

    def voted(self) -> None:
        self._mark("apply")
        marks, self._marks = self._marks, self._marks[-1:]
        # The device is idle, so this waits for nothing but the event itself.
        marks[-1][1].synchronize()
        spent: _Spent = {}
        for (part, event), (_, after) in pairwise(marks):
            if part is not None:
                spent[part] = spent.get(part, 0.0) + event.elapsed_time(after) / 1000
        self._times = _times(spent)

    def resume(self) -> None:
        self._marks.clear()
        self._mark("apply")

    def end(self) -> PartTimes:
        self._mark(None)
        return self._times

    def _mark(self, part: Part | None) -> None:
        event = self._module.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))


def own_seconds(times: PartTimes, layout: Layout) -> float | None:
    """Device seconds in which this rank certainly waited for no other; None where none is certain.

    Data and forward pass, where the forward pass has no collective: of replicas alone. Ranks that
    share parameters or a sample wait for each other in it. The backward pass ends with the
    gradients' reduction, and so with the slowest rank.

    >>> layout = Layout(data=2, sharding="none", micro_batch=1, accumulation=1)
    >>> own_seconds(PartTimes(data_s=0.1, forward_s=0.5, backward_s=1.0), layout)
    0.6
    """
    splits = (layout.tensor, layout.context, layout.pipeline, layout.expert)
    if layout.sharding != "none" or max(splits) > 1 or times.forward_s is None:
        return None
    return times.forward_s + (times.data_s or 0.0)


def _times(spent: _Spent) -> PartTimes:
    return PartTimes(
        data_s=spent.get("data"),
        forward_s=spent.get("forward"),
        backward_s=spent.get("backward"),
        vote_s=spent.get("vote"),
        apply_s=spent.get("apply"),
    )
