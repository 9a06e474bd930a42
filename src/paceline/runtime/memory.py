"""How much memory this rank holds and has held."""

import resource
import sys
from pathlib import Path

import torch


def held_bytes(device: torch.device) -> int:
    """Memory now: allocated on an accelerator, resident on a CPU (0 where that is not told)."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_bytes(device: torch.device) -> int:
    """Highest so far, counted as in `held_bytes`."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now on; on a CPU it counts the whole process's life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
