"""The profile of a person's own module, from what a helper process counted.

Leaves out: FLOPs and activations. They depend on what the module does with its input, which only
running it tells; they stay None.
"""

from dataclasses import dataclass

from paceline.profile.model import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """What a helper process counted of a module built on the meta device."""

    num_parameters: int
    """All parameters; shared ones count once."""

    largest_block_parameters: int
    """Parameters of the largest repeated block; 0 without repeated blocks."""

    num_blocks: int
    """Repeated blocks that full sharding gathers one by one."""


def profile_module(facts: ModuleFacts) -> ModelProfile:
    """The profile of a module: parameters exact, FLOPs and activations unknown.

    Blocks are taken to be as large as the largest one, so the root unit may come out too small
    but never below zero.
    """
    in_blocks = facts.num_blocks * facts.largest_block_parameters
    return ModelProfile(
        num_parameters=facts.num_parameters,
        num_block_parameters=facts.largest_block_parameters,
        num_blocks=facts.num_blocks,
        num_root_parameters=max(0, facts.num_parameters - in_blocks),
        seq_len=None,
        forward_flops_per_sample=None,
        activation_bytes=None,
    )
