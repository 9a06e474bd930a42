"""Runs a person's script unchanged, and a few of its steps under torch.profiler.

    python -m paceline.runtime.script_profile train.py --lr 0.1

A step ends with the step of the first optimizer that is used; gradients may be accumulated before.
The first steps only warm up. Forward is the time in the outermost module that is called, a loss
module included. Phases are taken from the host's clock; on an accelerator the kernels that a phase
started are added up beside it.

Limitations: an optimizer that is not a `torch.optim.Optimizer` is not seen. A loss that is no
module counts as everything else. Kernels of several streams count as one after the other.
"""

import atexit
import os
import re
import runpy
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.record.lines import write_json
from paceline.record.script_profile import VARIABLE, Part, ScriptProfile
from paceline.runtime.memory import peak_bytes

AFTER = 3
"""Steps that warm up: allocators, autotuning, the first buckets of DDP."""

STEPS = 5
"""Steps that are measured. torch.profiler keeps every operator of them in memory."""

_OPERATORS = 12
"""Operators that are kept."""

_MARK = "paceline: "
_REST = "everything else"
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_(\w+?)(?:_|\()")


def main() -> None:
    path = os.environ.get(VARIABLE)
    if path is not None:
        _Watch(Path(path)).begin()
    run_as_main(sys.argv[1:])


def run_as_main(words: list[str]) -> None:
    """Run a script with its arguments as Python itself does: `sys.argv`, `sys.path` and `__main__`
    are the script's."""
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


@dataclass(slots=True)
class _Watch:
    """Counts optimizer steps, and profiles some."""

    path: Path
    steps: int = 0
    began_s: float = 0.0
    optimizer: int | None = None
    """`id` of the first one that did a step."""

    profiler: torch.profiler.profile | None = None
    mark: Any = None
    depth: int = 0
    """Modules that are being called, one inside the other."""

    forward: Any = None
    is_over: bool = False
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """The script's own: workers of others call modules too."""

    backward: Callable[..., Any] = field(default=torch.autograd.backward)

    def begin(self) -> None:
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        register_module_forward_pre_hook(self._enters)
        register_module_forward_hook(self._leaves, always_call=True)
        torch.autograd.backward = self._backward
        atexit.register(self._end)

    def _enters(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or threading.current_thread() is not self.thread:
            return
        if self.depth == 0 and self.profiler is not None and not self.is_over:
            self.forward = torch.profiler.record_function(f"{_MARK}forward")
            self.forward.__enter__()
        self.depth += 1

    def _leaves(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or threading.current_thread() is not self.thread:
            return
        self.depth = max(0, self.depth - 1)
        if self.depth == 0 and self.forward is not None:
            self.forward.__exit__(None, None, None)
            self.forward = None

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"{_MARK}backward"):
            return self.backward(*args, **kwargs)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizer = self.optimizer or id(optimizer)
        if self.optimizer == id(optimizer) and not self.is_over:
            self.mark = torch.profiler.record_function(f"{_MARK}optimizer")
            self.mark.__enter__()

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.optimizer != id(optimizer) or self.is_over or self.mark is None:
            return
        self.mark.__exit__(None, None, None)
        self.steps += 1
        if self.steps == AFTER:
            _settle()
            self.profiler = torch.profiler.profile()
            self.profiler.start()
            self.began_s = time.perf_counter()
        elif self.steps == AFTER + STEPS:
            self._end()

    def _end(self) -> None:
        """Write what was measured, once; also when the script ends sooner."""
        if self.is_over:
            return
        self.is_over = True
        num_steps = max(0, self.steps - AFTER)
        if self.profiler is None or num_steps == 0:
            write_json(self.path, ScriptProfile(steps=0, after=self.steps))
            return
        _settle()
        seconds = time.perf_counter() - self.began_s
        self.profiler.stop()
        write_json(self.path, _summed(self.profiler, num_steps, seconds))


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summed(profiler: torch.profiler.profile, num_steps: int, seconds: float) -> ScriptProfile:
    events: list[Any] = list(profiler.events() or [])  # type: ignore[no-untyped-call]
    spans = sorted(_outermost(sorted(_spans(events))))
    has_device = any(event.kernels for event in events)
    host: defaultdict[str, float] = defaultdict(float)
    for start, end, name in spans:
        host[name] += (end - start) / 1e6
    host[_REST] = max(0.0, seconds - sum(host.values()))
    device = _device_seconds(events, spans) if has_device else {}
    return ScriptProfile(
        steps=num_steps,
        after=AFTER,
        step_s=seconds / num_steps,
        phases=[
            Part(
                name=name,
                seconds=host[name] / num_steps,
                device_s=device.get(name, 0.0) / num_steps if has_device else None,
            )
            for name in ("data", "forward", "backward", "optimizer", _REST)
        ],
        communication=list(_communication(events, num_steps)),
        busy=min(1.0, sum(device.values()) / seconds) if has_device else None,
        peak_bytes=peak_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        operators=list(_operators(profiler, num_steps, has_device=has_device)),
    )


def _spans(events: Iterable[Any]) -> Iterator[tuple[float, float, str]]:
    """Start, end and name of each phase on the host, in microseconds."""
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        if event.name.startswith(_MARK) and event.device_type.name == "CPU":
            yield start, end, event.name.removeprefix(_MARK)
        elif event.name.startswith("enumerate(DataLoader)"):
            yield start, end, "data"


def _outermost(spans: list[tuple[float, float, str]]) -> Iterator[tuple[float, float, str]]:
    """Phases that are in no other: recomputation calls modules while backward runs, and what makes
    a batch may."""
    over = -1.0
    for start, end, name in spans:
        if start >= over:
            over = end
            yield start, end, name


def _device_seconds(
    events: Iterable[Any], spans: list[tuple[float, float, str]]
) -> dict[str, float]:
    """Seconds of kernels by the phase in which they were started; collectives are left out."""
    found: defaultdict[str, float] = defaultdict(float)
    for event in events:
        kernels = [kernel for kernel in event.kernels if not _NCCL.search(kernel.name)]
        if not kernels:
            continue
        start = event.time_range.start
        name = next((n for begin, end, n in spans if begin <= start < end), _REST)
        found[name] += sum(kernel.duration for kernel in kernels) / 1e6
    return found


def _communication(events: Iterable[Any], num_steps: int) -> Iterator[Part]:
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    for event in events:
        nccl = _NCCL.search(event.name)
        if nccl is None and not event.name.startswith("gloo:"):
            continue
        name = nccl[1] if nccl is not None else event.name.removeprefix("gloo:")
        seconds[name] += event.time_range.elapsed_us() / 1e6
        calls[name] += 1
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        yield Part(name=name, seconds=seconds[name] / num_steps, calls=calls[name] / num_steps)


def _operators(
    profiler: torch.profiler.profile, num_steps: int, *, has_device: bool
) -> Iterator[Part]:
    def own(row: Any) -> float:
        return float(row.self_device_time_total if has_device else row.self_cpu_time_total)

    rows = [row for row in profiler.key_averages() if not row.key.startswith(_MARK)]
    for row in sorted(rows, key=own, reverse=True)[:_OPERATORS]:
        if own(row) > 0:
            yield Part(
                name=row.key,
                seconds=row.self_cpu_time_total / 1e6 / num_steps,
                device_s=row.self_device_time_total / 1e6 / num_steps if has_device else None,
                calls=row.count / num_steps,
            )


if __name__ == "__main__":
    main()
