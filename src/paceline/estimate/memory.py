"""How much memory the fullest rank of a layout needs, by part, as our own runtime holds it.

Parameters, gradients and optimizer state are float32 whatever the precision. There is no master
copy besides: the parameters are the float32 master, bf16 is only the type they are multiplied in
(autocast, or FSDP2's mixed precision with float32 reduction). The fused optimizer step makes no
temporaries as large as the parameters.

A step has three moments at which a rank may be fullest; the parts are those of the worst one:

    loss    everything is saved for the backward pass, the gradients of the logits exist
    block   the last block goes backward: its temporaries, and two blocks gathered
    root    all activations are gone, the root unit's gradients are whole before they are reduced

Leaves out: attention without a flash kernel, the training data a rank holds, and the whole model
that every rank builds on the host before it is sharded.

Source: FSDP2's memory: torch/distributed/fsdp/_fully_shard, read at 2.13; DDP's gradients are its
buckets (`gradient_as_bucket_view`); design/planner.md 3.1.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.parallel import Layout
from paceline.profile import ActivationBytes, ComputeMode, ModelProfile
from paceline.topology import Cluster

Precision = Literal["fp32", "bf16"]
Optimizer = Literal["adamw", "sgd"]

_FLOAT32 = 4
_MOMENTS = {"adamw": 2, "sgd": 1}
"""Float32 numbers an optimizer keeps for each parameter; SGD's is its momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest rank, at the moment in a step when it is fullest."""

    parameters_bytes: int
    """Float32 parameters, or this rank's shard of them."""

    gradients_bytes: int
    """Float32 gradients, or this rank's shard of them."""

    optimizer_bytes: int
    """Float32 moments of the optimizer."""

    master_copy_bytes: int
    """Always 0: the parameters themselves are the float32 master copy."""

    activations_bytes: int | None
    """Saved for the backward pass, and its temporaries; None when unknown."""

    gathered_bytes: int
    """Copies of parameters in the type they are multiplied in, and whole gradients of the units
    that are just being reduced."""

    overhead_bytes: int
    """Process or device context, and the libraries' buffers: what is there before the model."""

    checkpoint_copy_bytes: int = 0
    """On a CPU, this rank's share of a checkpoint, copied so that training goes on while it is
    written. On an accelerator the copy is in the host's memory, and 0 here."""

    slack_bytes: int = 0
    """What the allocator holds without a living tensor in it."""

    @property
    def parts(self) -> dict[str, int | None]:
        """Part -> bytes, in the order people read them."""
        return {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "master copy": self.master_copy_bytes,
            "activations": self.activations_bytes,
            "gathered": self.gathered_bytes,
            "saving": self.checkpoint_copy_bytes,
            "slack": self.slack_bytes,
            "overhead": self.overhead_bytes,
        }

    @property
    def known_bytes(self) -> int:
        """Sum of the parts that are known: at least this much is needed."""
        return sum(part for part in self.parts.values() if part is not None)

    @property
    def total_bytes(self) -> int | None:
        """Sum of all parts; None when one is unknown."""
        return None if self.activations_bytes is None else self.known_bytes


def estimate_memory(
    layout: Layout,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    precision: Precision,
    optimizer: Optimizer,
) -> MemoryEstimate:
    """Memory of the fullest rank of one layout."""
    shard = num_shard_parameters(profile, layout.shard_degree)
    activations, gathered = _fullest_moment(layout, profile, precision)
    keeps_whole_gradients = (
        layout.shard_degree > 1 and layout.accumulation > 1 and not layout.reduce_every_micro_batch
    )
    gradients = _FLOAT32 * (profile.num_parameters if keeps_whole_gradients else shard)
    moments = _FLOAT32 * _MOMENTS[optimizer] * shard
    tensors = _FLOAT32 * shard + gradients + moments + (activations or 0) + gathered
    saved = checkpoint_bytes(profile, optimizer) if cluster.backend == "gloo" else 0
    return MemoryEstimate(
        parameters_bytes=_FLOAT32 * shard,
        gradients_bytes=gradients,
        optimizer_bytes=moments,
        master_copy_bytes=0,
        activations_bytes=activations,
        gathered_bytes=gathered,
        checkpoint_copy_bytes=-(-saved // layout.num_ranks),
        slack_bytes=round(cluster.allocator_slack * tensors),
        overhead_bytes=cluster.overhead_bytes,
    )


def checkpoint_bytes(profile: ModelProfile, optimizer: Optimizer) -> int:
    """Bytes of one checkpoint: float32 parameters and moments; names and hashes left out."""
    return _FLOAT32 * (1 + _MOMENTS[optimizer]) * profile.num_parameters


def num_shard_parameters(profile: ModelProfile, degree: int) -> int:
    """Parameters of the fullest shard: each unit is divided by itself, and rounds up.

    Leaves out: FSDP2 divides each parameter along its first dim, so a dim shorter than the number
    of ranks leaves some ranks with more than this.
    """
    block = -(-profile.num_block_parameters // degree)
    root = -(-profile.num_root_parameters // degree)
    whole = profile.num_blocks * block + root
    return whole if degree > 1 else profile.num_parameters


def compute_mode(layout: Layout, precision: Precision) -> ComputeMode:
    """How a layout multiplies its matrices in a precision."""
    if precision == "fp32":
        return "fp32"
    return "bf16-sharded" if layout.shard_degree > 1 else "bf16-autocast"


class _Moment(NamedTuple):
    activations: int | None
    gathered: int


def _fullest_moment(layout: Layout, profile: ModelProfile, precision: Precision) -> _Moment:
    activations = profile.activation_bytes
    mode = compute_mode(layout, precision)
    saved = activations[mode] if activations is not None else None
    held = _sharded_copies if layout.shard_degree > 1 else _whole_copies
    at_loss, at_block, at_root = held(layout, profile, precision)
    batch = layout.micro_batch
    moments = [
        _Moment(_at_loss(saved, profile.num_blocks, batch), at_loss),
        _Moment(_at_block(saved, profile.num_blocks, batch), at_block),
        _Moment(None if saved is None else 0, at_root),
    ]
    return max(moments, key=lambda moment: (moment.activations or 0) + moment.gathered)


def _at_loss(saved: ActivationBytes | None, num_blocks: int, batch: int) -> int | None:
    if saved is None:
        return None
    return batch * (num_blocks * saved.block + saved.outside + saved.loss_peak)


def _at_block(saved: ActivationBytes | None, num_blocks: int, batch: int) -> int | None:
    if saved is None:
        return None
    return batch * (num_blocks * saved.block + saved.block_peak)


def _whole_copies(
    layout: Layout, profile: ModelProfile, precision: Precision
) -> tuple[int, int, int]:
    """DDP or one rank: under autocast, the casts of all matrices are saved for the backward."""
    cast = 2 * profile.num_parameters if precision == "bf16" else 0
    return cast, cast, 0


def _sharded_copies(
    layout: Layout, profile: ModelProfile, precision: Precision
) -> tuple[int, int, int]:
    """FSDP2: the root stays gathered; of the blocks, the current and the prefetched one are.

    A unit's gradients exist whole in the type of the multiplication, and once more in float32 as
    the input of the reduce-scatter. Where whole gradients are kept between micro-batches, they are
    counted there and only the reduce-scatter's input is new.
    """
    narrow = 2 if precision == "bf16" else _FLOAT32
    block, root = profile.num_block_parameters, profile.num_root_parameters
    two_blocks = narrow * min(2, profile.num_blocks) * block
    reduced = narrow + _FLOAT32
    at_loss = narrow * (root + (block if profile.num_blocks else 0))
    return at_loss, narrow * root + two_blocks + reduced * block, (narrow + reduced) * root
