"""The profile of a person's own module, from what a helper process counted."""

from dataclasses import dataclass

from paceline.profile.block import Block, MeasuredCosts
from paceline.profile.model import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """What a helper process counted of repeated blocks that are all alike."""

    name: str
    """Name of their class."""

    count: int
    """How many there are."""

    num_parameters: int
    """Parameters of one; those it shares with an earlier block are not counted."""

    forward_flops: float | None = None
    """FLOPs of one sample's forward pass through one block; None when it could not be run."""

    saved_bytes: int | None = None
    """Bytes one sample leaves for the backward pass in one block, in float32; None as above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """What a helper process counted of a module built on the meta device."""

    num_parameters: int
    """All parameters; shared ones count once."""

    blocks: tuple[BlockFacts, ...] = ()
    """Repeated blocks that full sharding gathers one by one, by kind."""


def profile_module(facts: ModuleFacts, *, name: str = "module") -> ModelProfile:
    """The profile of a module: parameters exact, FLOPs and activations where it could be run.

    What is outside the repeated blocks counts as embedding: which of it is a head is not known.
    """
    in_blocks = sum(each.count * each.num_parameters for each in facts.blocks)
    return ModelProfile(
        name=name,
        blocks=tuple(_block(each) for each in facts.blocks),
        num_embedding_parameters=facts.num_parameters - in_blocks,
        num_head_parameters=0,
        head_inputs=0,
        head_outputs=0,
        tied=False,
        seq_len=None,
    )


def _block(facts: BlockFacts) -> Block:
    measured = MeasuredCosts(
        num_parameters=facts.num_parameters,
        forward_flops=facts.forward_flops,
        saved_bytes=facts.saved_bytes,
    )
    return Block(name=facts.name, count=facts.count, hidden=0, measured=measured)
