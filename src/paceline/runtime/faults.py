"""A drill's faults inside a worker: stand still at the named place, and do there what is asked.

At its place a worker tells the controller and waits for the word, so that a fault happens once in a
run, at a place that is the same every time, and its moment is on the record before it happens. What
kills or stops a worker from outside is the agent's (`control/injection.py`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from paceline.control import messages as say
from paceline.job.fault_grammar import Fault, parse_fault
from paceline.runtime.channel import Line
from paceline.runtime.strategy.local import local_of


class InjectedError(RuntimeError):
    """What a drill raises."""


class Faults:
    """The faults of this rank that have not happened yet."""

    def __init__(self, faults: Sequence[str] = (), *, rank: int, channel: Line) -> None:
        every = [parse_fault(text) for text in faults]
        self._due = [fault for fault in every if not fault.ranks or fault.ranks[0] == rank]
        self._channel = channel
        self._lock = threading.Lock()
        self._state: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def flips_in(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """From now on bits are flipped in this state."""
        self._state = model, optimizer

    @property
    def state(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Where bits are flipped."""
        assert self._state is not None, "a state comes before its bits"
        return self._state

    def pass_by(self, phase: str, step: int) -> set[str]:
        """Kinds of what has just happened here: none, unless a fault was due at this place.

        May not return, or raise.
        """
        if not self._due:
            return set()
        found = [
            fault
            for fault in self._due
            if fault.phase == phase
            and fault.sample is None
            and (fault.in_recovery or fault.step == step)
        ]
        return {fault.kind for fault in found if self._happen(fault)}

    def see(self, samples: Sequence[int]) -> None:
        """A micro-batch of these samples is about to be computed."""
        for fault in self._due:
            if fault.sample is not None and fault.sample in samples and self._happen(fault):
                raise InjectedError(f"sample {fault.sample} is poisoned")

    def _happen(self, fault: Fault) -> bool:
        with self._lock:
            is_due = fault in self._due
            if is_due and fault.sample is None:
                self._due.remove(fault)
        if not is_due:
            return False
        self._channel.send(say.FaultDue(fault=fault.text))
        if not self._channel.wait_for_fire(fault.text):
            return False
        act = _ACTIONS.get(fault.kind)
        if act is not None:
            act(fault, self)
        return True


def _segv(fault: Fault, faults: Faults) -> None:
    ctypes.string_at(0)


def _abort(fault: Fault, faults: Faults) -> None:
    os.abort()


def _exit(fault: Fault, faults: Faults) -> None:
    os._exit(77)


def _raise(fault: Fault, faults: Faults) -> None:
    raise InjectedError(f"as the drill asks: {fault.text}")


def _oom(fault: Fault, faults: Faults) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), before[1]))
    try:
        bytearray(256 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _deadlock(fault: Fault, faults: Faults) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _gil(fault: Fault, faults: Faults) -> None:
    while True:  # a call through PyDLL keeps the interpreter's lock
        ctypes.PyDLL(None).pause()


def _loop(fault: Fault, faults: Faults) -> None:
    count = 0
    while True:
        count += 1


def _long(fault: Fault, faults: Faults) -> None:
    time.sleep(fault.for_s or 0.0)


def _pause(fault: Fault, faults: Faults) -> None:
    ctypes.PyDLL(None).usleep(int((fault.for_s or 0.0) * 1e6))


def _clock(fault: Fault, faults: Faults) -> None:
    true_time = time.time
    time.time = lambda: true_time() + 3600.0


@torch.no_grad()
def _flip(fault: Fault, faults: Faults) -> None:
    model, optimizer = faults.state
    tensors = [local_of(each.detach()) for each in model.parameters()]
    if fault.of == "optimizer":
        states = (optimizer.state.get(each, {}) for each in model.parameters())
        tensors = [
            local_of(value)
            for state in states
            for key, value in sorted(state.items())
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]
    target = next(each for each in tensors if each.numel() and each.element_size() == 4)
    bits = target.reshape(-1).view(torch.int32)
    bits[0] ^= 1 << 23


_ACTIONS: Mapping[str, Callable[[Fault, Faults], None]] = {
    "segv": _segv,
    "abort": _abort,
    "exit": _exit,
    "raise": _raise,
    "oom": _oom,
    "deadlock": _deadlock,
    "gil": _gil,
    "loop": _loop,
    "long": _long,
    "pause": _pause,
    "clock": _clock,
    "flip": _flip,
}
"""Kind -> what the worker does. Kinds that are not here are the agent's, or done where the phase
is: `nan` in the vote, `poison` by `see`."""
