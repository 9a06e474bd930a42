"""How the work is split: one `Layout`, and nothing about whether it is a good one."""

from dataclasses import dataclass
from math import prod

from paceline.choices import ContextKind, Offload, Recompute, Schedule, Sharding
from paceline.choices.pipeline_schedules import PLAIN
from paceline.choices.recomputes import WHOLE_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks share each way of splitting the work. 1 means unsplit."""

    data: int
    """Ranks that hold the same part of the model and read different samples."""

    sharding: Sharding
    """What the data ranks share. `none`: nothing, every one holds its part whole (DDP). `zero1`:
    optimizer state. `zero2`: also gradients; with FSDP2 parameters stay gathered between forward
    and backward. `full`: also parameters (ZeRO-3, FSDP2). `hybrid`: as `full` inside groups of
    `shard` ranks, whole copies between the groups (HSDP)."""

    micro_batch: int
    """Samples one rank computes at once."""

    accumulation: int
    """Micro-batches whose gradients are added up before one optimizer step."""

    reduce_every_micro_batch: bool = False
    """Only with full sharding: reduce and shard the gradients after every micro-batch, which
    communicates more and holds only a shard of the gradients in between."""

    shard: int | None = None
    """Only with hybrid sharding: ranks that share one copy."""

    tensor: int = 1
    """Ranks that share one layer's matrices. Kept inside a node."""

    sequence_parallel: bool = True
    """Whether norms and dropout between the matrices are split over the tensor ranks as well.
    Source: Korthikanti et al., arXiv:2205.05198."""

    pipeline: int = 1
    """Groups of ranks (stages) that hold consecutive layers."""

    schedule: Schedule = PLAIN
    """Order of the micro-batches in the stages."""

    chunks: int = 1
    """Parts of the model that each stage holds, not next to each other: virtual stages."""

    context: int = 1
    """Ranks that share the tokens of one sample."""

    context_kind: ContextKind = "ring"
    """`ring`: keys and values travel round. `ulysses`: tokens are exchanged for heads."""

    expert: int = 1
    """Ranks that share the routed experts; they are among the data and context ranks."""

    recompute: Recompute = "none"
    """What is computed again in the backward pass instead of kept: nothing, what is cheap, or
    whole blocks."""

    recompute_every: int = 1
    """Only with full recompute: every how many blocks one is recomputed."""

    offload: Offload = "none"
    """Where optimizer state is kept: on the accelerator, in the host's memory, or on its disk."""

    offload_parameters: bool = False
    """Whether parameters and gradients are kept there too, and copied to the accelerator block by
    block (ZeRO-Infinity, FSDP's `CPUOffload`)."""

    batch: int | None = None
    """Samples in one optimizer step, only where ranks take unequal numbers of them: after a loss,
    when `data` x `micro_batch` x `accumulation` is more. `micro_batch` is then the largest."""

    @property
    def offloaded(self) -> str:
        """What leaves the accelerators where `offload` is set, in words."""
        return "parameters, gradients and optimizer" if self.offload_parameters else "optimizer"

    @property
    def num_ranks(self) -> int:
        """Ranks in the whole layout."""
        return prod((self.data, self.tensor, self.pipeline, self.context))

    @property
    def degrees(self) -> dict[str, int]:
        """The ways that are split, and over how many ranks."""
        ways = {
            "data": self.data,
            "shard": self.shard_degree,
            "tensor": self.tensor,
            "context": self.context,
            "pipeline": self.pipeline,
            "expert": self.expert,
        }
        return {way: degree for way, degree in ways.items() if degree > 1}

    @property
    def global_batch(self) -> int:
        """Samples in one optimizer step."""
        return self.batch or self.data * self.micro_batch * self.accumulation

    def micro_batches_of(self, data_rank: int) -> list[int]:
        """Samples in each micro-batch of a data rank, as equal as they can be.

        All ranks have the same number of micro-batches, as they meet in each of them where
        parameters or experts are shared: one of 0 samples only takes part.

        >>> nine = Layout(data=2, sharding="none", micro_batch=1, accumulation=5, batch=9)
        >>> nine.micro_batches_of(0), nine.micro_batches_of(1)
        ([1, 1, 1, 1, 1], [1, 1, 1, 1, 0])
        """
        share, rest = divmod(self.global_batch, self.data)
        size, more = divmod(share + (data_rank < rest), self.accumulation)
        return [size + (index < more) for index in range(self.accumulation)]

    @property
    def shard_degree(self) -> int:
        """Ranks that share one copy of the optimizer state."""
        if self.sharding == "none":
            return 1
        if self.sharding == "hybrid":
            return self.shard or self.data * self.context
        return self.data * self.context

    @property
    def keeps_shards(self) -> bool:
        """Whether parameters are kept as shards: over several ranks, or by one that offloads them.

        >>> import dataclasses
        >>> one = Layout(data=1, sharding="full", micro_batch=1, accumulation=1)
        >>> one.keeps_shards, dataclasses.replace(one, offload="cpu").keeps_shards
        (False, True)
        """
        return self.shard_degree > 1 or (self.sharding != "none" and self.offload != "none")

    @property
    def name(self) -> str:
        """A short name for people: the axes, then what the data-parallel ranks share.

        >>> Layout(data=8, sharding="full", micro_batch=1, accumulation=1).name
        'FSDP2 over 8 ranks'
        >>> Layout(data=4, sharding="zero1", micro_batch=1, accumulation=8, tensor=8, pipeline=4,
        ...     schedule="interleaved", chunks=5).name
        'data 4 x tensor 8 x pipeline 4 (interleaved, 5 virtual stages), ZeRO-1'
        >>> Layout(data=2, sharding="zero1", micro_batch=1, accumulation=8, context=2).name
        'data 2 x context parallel 2 (ring), ZeRO-1'
        >>> Layout(data=1, sharding="none", micro_batch=1, accumulation=8, tensor=2).name
        'tensor 2'
        """
        return self.named("FSDP2")

    def named(self, full: str) -> str:
        """The name, with the engine's word for full sharding.

        >>> Layout(data=8, sharding="full", micro_batch=1, accumulation=1).named("ZeRO-3")
        'ZeRO-3 over 8 ranks'
        """
        ring = self.context_kind.replace("ulysses", "Ulysses")
        virtual = f", {self.chunks} virtual stages" if self.chunks > 1 else ""
        axes = {
            f"data {self.data}": self.data,
            f"context parallel {self.context} ({ring})": self.context,
            f"tensor {self.tensor}": self.tensor,
            f"pipeline {self.pipeline} ({self.schedule}{virtual})": self.pipeline,
        }
        split = [axis for axis, degree in axes.items() if degree > 1]
        is_shared = self.data * self.context > 1 or self.keeps_shards
        parts = [" x ".join(split), *([self.way(full)] if is_shared else ())]
        if self.num_ranks == self.data:
            ranks = "1 rank" if self.data == 1 else f"{self.data} ranks"
            parts = [f"{self.way(full)} over {ranks}" if is_shared else ranks]
        experts = [f"expert {self.expert}"] if self.expert > 1 else []
        return ", ".join([*filter(None, parts), *experts])

    @property
    def recomputed(self) -> str:
        """What stands behind the name where whole blocks are recomputed."""
        if self.recompute not in WHOLE_BLOCKS:
            return ""
        every = f" every {self.recompute_every} blocks" if self.recompute_every > 1 else ""
        return f", {self.recompute} recompute{every}"

    def way(self, full: str) -> str:
        """What data-parallel ranks share, in words, with the engine's word for full sharding."""
        ways = {"none": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "full": full}
        return ways.get(self.sharding, f"HSDP (shard {self.shard_degree})")
