"""What `paceline calibrate` measured of a machine: times, before anything is fitted to them.

Leaves out: what the times mean for the planner's constants; see `estimate/fit_rates.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """One product of (rows x inner) and (inner x columns)."""

    precision: str
    rows: int
    inner: int
    columns: int

    seconds: float
    """Median of all repeats."""

    spread: float
    """How much longer the 80th percentile is than the 20th, as a share of the median."""

    num_repeats: int

    @property
    def flops_per_s(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SustainedRate:
    """One large product again and again, after the machine has warmed up."""

    precision: str
    flops_per_s: float
    burst_flops_per_s: float
    """Rate of the product in its first moments."""

    seconds: float
    """How long the loop ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """Causal attention of a batch: scores, softmax and weighted values."""

    kernel: str
    """`flash2` or `flash3` as in `efficiencies.toml`, or `any` where there is one kernel."""

    precision: str
    samples: int
    heads: int
    seq_len: int
    head_dim: int
    forward_s: float
    backward_s: float
    spread: float
    num_repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTime:
    """One operation on tensors that no cache holds."""

    kind: Literal["copy", "triad", "gelu"]
    num_bytes: int
    """Read and written."""

    seconds: float
    spread: float
    num_repeats: int

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """One collective of all ranks, or of those of one node."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    num_bytes: int
    """Whole payload: what each rank has after a gather, before a scatter."""

    num_ranks: int
    is_inside_node: bool
    seconds: float
    spread: float
    num_repeats: int

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Payload over time."""
        return self.num_bytes / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """What each rank's link carries, in one direction, if a ring does it.

        >>> CollectiveTime(kind="all_reduce", num_bytes=100, num_ranks=4, is_inside_node=True,
        ...                seconds=1.0, spread=0.0, num_repeats=1).bus_bytes_per_s
        150.0
        """
        passes = 2 if self.kind == "all_reduce" else 1
        moved = passes * (self.num_ranks - 1) / self.num_ranks
        return moved * self.algorithm_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything one call measured."""

    device: str
    """As the machine's own tool names it, or `cpu`."""

    backend: Literal["gloo", "nccl"]
    num_ranks: int
    ranks_per_node: int
    threads: int
    """Threads of each rank; all ranks compute at the same time, as in training."""

    versions: Mapping[str, str]
    at: str
    """Day and time, UTC."""

    seconds: float
    """That the measuring took."""

    products: tuple[ProductTime, ...] = ()
    sustained: tuple[SustainedRate, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    memory: tuple[MemoryTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    skipped: tuple[str, ...] = ()
    """What could not be measured, each with its reason."""
