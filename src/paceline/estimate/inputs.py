"""What bytes and seconds are worked out from: a model's sizes, what a software stack holds of each
parameter, and what it sends of it. `memory.py` and `step.py` do the rest.

Fields are numbers, or columns with one entry a row.
"""

from dataclasses import dataclass, field

import numpy as np

from paceline.estimate.sharding import Ways
from paceline.profile.block import Block, Value
from paceline.profile.saved import Kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What of a model a step's time needs; numbers, or columns of one model a row."""

    blocks: tuple[Block, ...]
    seq_len: Value
    head_inputs: Value
    head_outputs: Value
    num_embedding_parameters: Value
    num_head_parameters: Value
    num_tied_parameters: Value
    """Parameters of an output matrix that is the token embedding: held twice when they are on two
    stages."""

    is_balanced: Value
    """Whether stages may have different numbers of blocks, the last one fewer for its head."""

    trained_share: Value
    """Trained parameters as a share of all: 1, or nearly 0 with adapters."""

    caps_logits: Value = 0.0
    """1 where the model caps its logits."""

    written: Value = 0.0
    """1 where it is transformers' own code."""

    quantised_share: Value = 0.0
    """Parameters of the blocks that are kept in 4 bits, as a share of all in the blocks."""

    @property
    def num_blocks(self) -> Value:
        """Number of blocks of all kinds."""
        return sum(np.asarray(block.count, float) for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes a parameter in the step's communication and in its optimizer."""

    weight_bytes: Value
    """Bytes of a gathered parameter."""

    element_bytes: Value
    """Bytes of an element of an activation or its gradient, as ranks of a sample or a layer send
    it."""

    reduce_bytes: Value
    """Bytes of a gradient on the wire."""

    optimizer_bytes: Value
    """Read and written by the optimizer for each parameter of its shard."""

    crossing_bytes: Value
    """Part of `optimizer_bytes` that crosses to the host and back where the optimizer's state is
    offloaded: the gradient, and the new weights."""

    host_bytes_per_s: Value
    """Between accelerator and host, for offloaded state."""

    host_memory_bytes_per_s: Value
    """A rank's share of its host's memory, for an optimizer that the host's cores run."""

    disk_bytes_per_s: Value
    """Between host and its disk, for state offloaded there."""

    sharded_bytes: Value = 4.0
    """Bytes of a parameter in full sharding: what is copied from the host where it is offloaded."""

    replica_share: Value = 1.0
    """What compression leaves of the gradients that replicas all-reduce."""

    ways: Ways = field(default_factory=Ways)
    """What the engine does its own way."""

    is_muon: Value = 0.0
    """1 where the optimizer is Muon: every matrix is made orthogonal, whole, in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Bytes a parameter that a software stack holds, and what its kernels keep."""

    weight_bytes: Value
    """Bytes of a parameter that is not sharded."""

    sharded_bytes: Value
    """Bytes of a parameter in full sharding."""

    gradient_bytes: Value
    passing_bytes: Value
    """Bytes of gradients before they are added to the accumulated ones, all at once."""

    master_bytes: Value
    """Bytes of a float32 copy besides the weights."""

    moment_bytes: Value
    """Bytes of all the optimizer's moments, for each parameter of the blocks."""

    root_moment_bytes: Value
    """Bytes of all the optimizer's moments, for each parameter outside the blocks."""

    gathered_bytes: Value
    """Bytes of a gathered parameter, in the type matrices are multiplied in."""

    cast_bytes: Value
    """Bytes of the copy that autocast keeps of every matrix that is not sharded."""

    step_bytes: Value
    """Bytes of temporaries while the optimizer steps, for each parameter of its shard."""

    step_unit: Value
    """Parameters of a shard that full sharding updates at once; infinite is all."""

    buffer_bytes: Value
    """Bytes of buckets and the like, whatever the model."""

    reduce_bytes: Value
    """Bytes of a gradient while it is reduced."""

    frozen_bytes: Value
    """Bytes of each frozen parameter outside the blocks, where only adapters are trained."""

    frozen_block_bytes: Value
    """Bytes of each frozen parameter in the blocks, on average."""

    is_frozen: Value
    """1 where only adapters are trained."""

    scaled_columns: Value
    """Outputs of a block that DoRA scales and keeps as they are before, split over tensor ranks."""

    scaled_rows: Value
    """Such outputs that are whole on every rank."""

    dummy_gradients: Value
    """1 where one bf16 buffer is kept for each shape of weight gradient."""

    kernels: Kernels
    overhead_bytes: Value
    reserved_share: Value
    """Bytes reserved for passing tensors, as a share of what they need."""

    saving_share: Value = 0.0
    """1 where a checkpoint is copied in the same memory while it is written (a CPU)."""

    has_host: Value = 1.0
    """0 where what is offloaded stays in the rank's own memory (a CPU)."""

    selective_cheap: Value = 1.0
    """1 where selective recompute keeps only what matrices and flash attention give; 0 where it
    keeps all but the scores of attention."""

    gathered_inputs: Value = 0.0
    """1 where tensor parallelism keeps its linears' inputs gathered until the backward pass."""

    ways: Ways = field(default_factory=Ways)
    """What the engine does its own way."""

    loss_chunk: Value = 0.0
    """Tokens whose logits exist at a time; 0 is all of a micro-batch."""
