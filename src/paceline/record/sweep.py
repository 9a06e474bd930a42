"""A sweep of all-reduce over growing sizes: what `render/scripts/all_reduce.py` writes."""

from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One size."""

    bytes: int
    """That every rank puts in, and gets back summed."""

    seconds: float
    """Mean of the slowest rank."""

    repeats: int
    algbw_bytes_per_s: float
    """bytes / seconds."""

    busbw_bytes_per_s: float
    """algbw x 2 (n - 1) / n: what a rank's link carries in one direction. Source: NVIDIA
    nccl-tests, doc/PERFORMANCE.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All sizes over one number of ranks."""

    world_size: int
    backend: str
    device: str
    torch: str
    rows: tuple[SweepRow, ...]

    @property
    def best_bytes_per_s(self) -> float:
        """The highest bus bandwidth; 0 on one rank, which sends nothing."""
        return max(row.busbw_bytes_per_s for row in self.rows)


def read_sweep(path: Path) -> Sweep:
    """What a sweep wrote, or `paceline bench --all-reduce --json` printed of one number of ranks.

    Raises:
        OSError, msgspec.ValidationError: It is not there, or not a sweep.
    """
    found = msgspec.json.decode(path.read_bytes())
    if isinstance(found, dict) and isinstance(found.get("sweeps"), list):
        if len(found["sweeps"]) != 1:
            raise msgspec.ValidationError("it has several numbers of ranks: measure with one")
        (found,) = found["sweeps"]
    return msgspec.convert(found, Sweep)
