"""Causal attention, forward and backward, at several lengths.

Shape suffixes: B samples, H heads, S tokens, D width of a head.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from paceline.catalog.measured import AttentionTime
from paceline.runtime.calibrate.clock import Clock

Case = tuple[int, int, int, int]
"""B, H, S, D."""


def measure_attention(
    clock: Clock, device: torch.device, skipped: list[str]
) -> list[AttentionTime]:
    """Each kernel that the device has, at lengths from short to as long as time allows."""
    kernels = _kernels(device)
    precision = "fp32" if device.type == "cpu" else "bf16"
    times: list[AttentionTime] = []
    for position, (name, backend) in enumerate(kernels.items()):
        with clock.part(f"attention, {name}", clock.left_s / (len(kernels) - position)):
            try:
                times += _measure_kernel(clock, device, name, backend, precision)
            except RuntimeError as error:
                skipped.append(f"attention {name}: {str(error).splitlines()[0]}")
    return times


def _kernels(device: torch.device) -> dict[str, SDPBackend | None]:
    """The names of `efficiencies.toml` and what runs them; the CPU has one flash kernel."""
    if device.type == "cpu":
        return {"any": None}
    found: dict[str, SDPBackend | None] = {"flash2": SDPBackend.FLASH_ATTENTION}
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        found["flash3"] = SDPBackend.CUDNN_ATTENTION
    return found


def _cases(device: torch.device) -> list[Case]:
    """Cases with as many tokens at every length on a GPU; few heads and samples on a CPU."""
    if device.type == "cpu":
        return [(max(1, 512 // s), 4, s, d) for s in (128, 256, 512, 1024, 2048) for d in (32, 64)]
    lengths = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    return [(max(1, 16384 // s), 16, s, d) for s in lengths for d in (64, 128)]


def _measure_kernel(
    clock: Clock, device: torch.device, name: str, backend: SDPBackend | None, precision: str
) -> Iterator[AttentionTime]:
    cases = _cases(device)
    for position, case in enumerate(cases):
        share_s = clock.left_s / (len(cases) - position)
        with _only(backend):
            forward, both = _calls(case, device, precision)
            forth = clock.time(forward, budget_s=0.4 * share_s)
            back = clock.time(both, budget_s=share_s)
        if forth is None or back is None or back.seconds <= forth.seconds:
            continue
        samples, heads, length, width = case
        yield AttentionTime(
            kernel=name,
            precision=precision,
            samples=samples,
            heads=heads,
            seq_len=length,
            head_dim=width,
            forward_s=forth.seconds,
            backward_s=back.seconds - forth.seconds,
            spread=max(forth.spread, back.spread),
            num_repeats=min(forth.num_repeats, back.num_repeats),
        )


def _only(backend: SDPBackend | None) -> AbstractContextManager[object]:
    return nullcontext() if backend is None else sdpa_kernel(backend)


def _calls(
    case: Case, device: torch.device, precision: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    b, h, s, d = case
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    q_BHSD, k_BHSD, v_BHSD = (
        torch.randn(b, h, s, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient_BHSD = torch.randn(b, h, s, d, device=device, dtype=dtype)

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, is_causal=True)

    def both() -> object:
        out_BHSD = forward()
        return torch.autograd.grad(out_BHSD, (q_BHSD, k_BHSD, v_BHSD), gradient_BHSD)

    return forward, both
