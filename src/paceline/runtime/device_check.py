"""Whether PyTorch gets the accelerators of this node, and how fast each multiplies matrices.

    python -m paceline.runtime.device_check FILE

A process of its own, as a broken driver can end or hold the one that asks it.
"""

import sys
import time
from pathlib import Path

import msgspec
import torch

from paceline.topology.node.facts import Device, TorchFacts

_SIZE = 8192
"""Rows of square bf16 matrices: large enough that every GPU of today is busy, 0.4 GB in all."""

_CPU_SIZE = 1024
_FOR_S = 0.5
"""How long products are timed, after the warm-up."""


def check_devices() -> TorchFacts:
    """This process's PyTorch and each device that it sees."""
    hip = getattr(torch.version, "hip", None)
    available, why = False, None
    try:
        if torch.version.cuda is not None or hip is not None:
            torch.zeros(1, device="cuda")  # says what is wrong, where is_available only says no
            available = torch.cuda.is_available()
        else:
            why = f"torch {torch.__version__} was built without CUDA and ROCm"
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().splitlines()[0]
    version: tuple[int, ...] = torch.cuda.nccl.version() if available else ()  # type: ignore[no-untyped-call]
    nccl = ".".join(str(part) for part in version) or None
    devices = (
        [_device(index) for index in range(torch.cuda.device_count())]
        if available
        else [Device(name="cpu", matmul_flops_per_s=_matmul(torch.device("cpu"), _CPU_SIZE))]
    )
    return TorchFacts(
        torch=str(torch.__version__),
        cuda=f"hip {hip}" if hip else torch.version.cuda,
        nccl=nccl,
        architectures=tuple(torch.cuda.get_arch_list()) if available else (),
        is_available=available,
        why_not=why,
        devices=tuple(devices),
    )


def _device(index: int) -> Device:
    device = torch.device("cuda", index)
    try:
        name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        rate = _matmul(device, _SIZE)
    except RuntimeError as error:
        return Device(name=f"GPU {index}", why_not=str(error).strip().splitlines()[0])
    return Device(name=name, capability=f"sm_{major}{minor}", matmul_flops_per_s=rate)


def _matmul(device: torch.device, size: int) -> float:
    """FLOP/s of the fastest of some products; memory that is too full takes smaller ones."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    except torch.OutOfMemoryError:
        return _matmul(device, size // 2)
    best, end = float("inf"), time.perf_counter() + _FOR_S
    for number in range(1000):
        _wait(device)
        began = time.perf_counter()
        left @ right
        _wait(device)
        if number >= 3:  # the first ones choose kernels
            best = min(best, time.perf_counter() - began)
            if time.perf_counter() > end:
                break
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(check_devices()))
