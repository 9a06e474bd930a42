"""What any model costs: one `ModelProfile`, the same for every layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ComputeMode = Literal["fp32", "bf16-autocast", "bf16-sharded"]
"""How the matrices are multiplied: all in float32; float32 parameters under autocast (DDP, or one
rank); or FSDP2 gathering bfloat16 parameters. The last two save different tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBytes:
    """What one sample adds to memory between its forward and its backward pass."""

    block: int
    """Saved by autograd in one block."""

    outside: int
    """Saved outside the blocks: embedding, final norm, output layer and loss."""

    loss_peak: int
    """Alive besides all that is saved while the loss goes backward: the gradients of the logits."""

    block_peak: int
    """Alive besides what is saved while one block goes backward: gradients inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Costs of a model that no layout changes. None is unknown, and stays so."""

    num_parameters: int
    """Trainable parameters, exactly as the module counts them; tied ones once."""

    num_block_parameters: int
    """Parameters of the largest block. 0 when the model has no repeated blocks."""

    num_blocks: int
    """Repeated blocks, which full sharding gathers one by one."""

    num_root_parameters: int
    """Parameters outside the blocks (embedding, final norm, output layer): one unit of their own,
    which stays gathered from the forward to the end of the backward pass."""

    seq_len: int | None
    """Tokens in one sample; None where a sample is not a row of tokens."""

    forward_flops_per_sample: float | None
    """FLOPs of one sample's forward pass: matrix multiplications and attention. A multiplication
    and an addition are two; causal attention counts the half that is computed. Backward is twice
    as many."""

    activation_bytes: Mapping[ComputeMode, ActivationBytes] | None
    """What one sample keeps in memory, by the way it is computed."""

    @property
    def num_units(self) -> int:
        """Units that full sharding gathers: each block, and the root if it has parameters."""
        return self.num_blocks + (self.num_root_parameters > 0)

    @property
    def largest_unit_parameters(self) -> int:
        """Parameters of the largest unit that full sharding gathers."""
        return max(self.num_block_parameters, self.num_root_parameters)
