"""How much memory this rank holds and has held."""

import resource
import sys
from pathlib import Path

import torch

from paceline.runtime.devices import is_accelerator


def held_bytes(device: torch.device) -> int | None:
    """Memory now: allocated on an accelerator, resident on a CPU; None where it is not counted."""
    if is_accelerator(device):
        return _allocator(device, "memory_allocated")
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_bytes(device: torch.device) -> int | None:
    """Highest so far, counted as in `held_bytes`."""
    if is_accelerator(device):
        return _allocator(device, "max_memory_allocated")
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reserved_bytes(device: torch.device) -> int | None:
    """The most that the allocator has held of an accelerator, with what it keeps for later tensors;
    None on a CPU, and where the device does not count it."""
    return _allocator(device, "max_memory_reserved") if is_accelerator(device) else None


def forget_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now on; on a CPU it counts the whole process's life."""
    if is_accelerator(device):
        _allocator(device, "reset_peak_memory_stats")


def _allocator(device: torch.device, question: str) -> int | None:
    ask = getattr(torch.get_device_module(device), question, None)
    return ask(device) if ask is not None else None
