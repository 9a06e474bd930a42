"""Memory: a copy, a triad and an activation function, on tensors that no cache holds."""

from collections.abc import Callable
from typing import Literal

import torch

from paceline.catalog.measured import MemoryTime
from paceline.runtime.calibrate.clock import Clock

_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""Numbers of one tensor: 64 MiB in float32, where caches end at 32; 512 MiB in bf16, where they end
at 50 (H100) or 256 (MI300X)."""

_REPEATED = 16
"""Times that a block of random numbers is in a tensor. A choice: the block is no cache line."""

Kind = Literal["copy", "triad", "gelu"]


def measure_memory(clock: Clock, device: torch.device) -> list[MemoryTime]:
    """Bytes read and written, and the time it took."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    count = _ELEMENTS[device.type]
    block = count // _REPEATED  # drawing every number would take longer than moving them
    a, b = (torch.randn(block, device=device).to(dtype).repeat(_REPEATED) for _ in range(2))
    out = torch.empty_like(a)
    calls: list[tuple[Kind, int, Callable[[], object]]] = [
        ("copy", 2, lambda: out.copy_(a)),
        ("triad", 3, lambda: torch.add(a, b, alpha=0.5, out=out)),
        ("gelu", 2, lambda: torch.ops.aten.gelu.out(a, approximate="tanh", out=out)),
    ]
    times: list[MemoryTime] = []
    for position, (kind, passes, call) in enumerate(calls):
        timing = clock.time(call, budget_s=clock.left_s / (len(calls) - position))
        if timing is not None:
            times.append(
                MemoryTime(
                    kind=kind,
                    num_bytes=passes * count * out.element_size(),
                    seconds=timing.seconds,
                    spread=timing.spread,
                    num_repeats=timing.num_repeats,
                )
            )
    return times
