"""The profile of a person's own module, from what a helper process counted."""

from dataclasses import dataclass
from typing import Any

from paceline.errors import JobError
from paceline.profile.block import Block, MeasuredCosts
from paceline.profile.from_config import profile_config
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

    outside_flops: float | None = None
    """FLOPs of one sample's forward pass outside the blocks; None when it could not be run."""

    outside_saved_bytes: int | None = None
    """Bytes one sample leaves for the backward pass outside the blocks, in float32."""

    unknown_because: str | None = None
    """Why FLOPs and saved bytes are not known; None when they are."""

    config: dict[str, Any] | None = None
    """The fields of its config, when it is a Hugging Face model."""

    whole_because: str | None = None
    """Why every rank has the whole model in host memory while it is built; None where each rank
    makes its own part."""


def profile_module(
    facts: ModuleFacts, seq_len: int | None = None, *, name: str = "module"
) -> ModelProfile:
    """The profile of a module: parameters exact, FLOPs and activations where it could be run.

    A Hugging Face model of a known family is its family's profile, when that has as many
    parameters as the module. Of any other, what is outside the repeated blocks counts as embedding:
    which of it is a head is not known.

    Args:
        facts: What the helper counted.
        seq_len: Tokens in a sample.
        name: For people.
    """
    unknown = "activations are" if facts.outside_flops is not None else "FLOPs and activations are"
    said: tuple[str, ...] = (f"{unknown} not known: {facts.unknown_because}",)
    if facts.config is not None and seq_len is not None:
        family = facts.config.get("model_type")
        try:
            profile = profile_config(facts.config, seq_len, name=name)
        except JobError as refused:
            because = refused.problems[0].what
        else:
            if profile.num_parameters == facts.num_parameters:
                return profile
            because = (
                f"the family {family} would have {profile.num_parameters:,} parameters, the module "
                f"has {facts.num_parameters:,}"
            )
        said = (f"counted as a module of its own, as {because}", *said)
    in_blocks = sum(each.count * each.num_parameters for each in facts.blocks)
    outside = MeasuredCosts(
        num_parameters=facts.num_parameters - in_blocks,
        forward_flops=facts.outside_flops,
        saved_bytes=facts.outside_saved_bytes,
    )
    return ModelProfile(
        name=name,
        blocks=tuple(_block(each) for each in facts.blocks),
        num_embedding_parameters=outside.num_parameters,
        num_head_parameters=0,
        head_inputs=0,
        head_outputs=0,
        tied=False,
        seq_len=None,
        outside=outside,
        assumed=said if facts.unknown_because is not None else said[:-1],
    )


def _block(facts: BlockFacts) -> Block:
    measured = MeasuredCosts(
        num_parameters=facts.num_parameters,
        forward_flops=facts.forward_flops,
        saved_bytes=facts.saved_bytes,
    )
    return Block(name=facts.name, count=facts.count, hidden=0, measured=measured)
