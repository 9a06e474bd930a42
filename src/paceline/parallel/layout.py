"""How the work is split: one `Layout`, and nothing about whether it is a good one."""

from dataclasses import dataclass
from typing import Literal

Sharding = Literal["none", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks share each way of splitting the work. 1 means unsplit."""

    data: int
    """Ranks that read different samples."""

    sharding: Sharding
    """`none`: every rank holds the whole model (DDP). `full`: parameters, gradients and optimizer
    state are sharded over the data ranks (FSDP2)."""

    micro_batch: int
    """Samples one rank computes at once."""

    accumulation: int
    """Micro-batches whose gradients are added up before one optimizer step."""

    reduce_every_micro_batch: bool = False
    """Only with full sharding: reduce and shard the gradients after every micro-batch, which
    communicates more and holds only a shard of the gradients in between."""

    @property
    def num_ranks(self) -> int:
        """Ranks in the whole layout."""
        return self.data

    @property
    def global_batch(self) -> int:
        """Samples in one optimizer step."""
        return self.data * self.micro_batch * self.accumulation

    @property
    def shard_degree(self) -> int:
        """Ranks that share one copy of the optimizer state."""
        return self.data if self.sharding == "full" else 1

    @property
    def name(self) -> str:
        """A short name for people, such as `FSDP2 over 8 ranks`."""
        ways = {"none": "DDP", "full": "FSDP2"}
        return f"{ways[self.sharding]} over {self.data} rank{'s' if self.data > 1 else ''}"
