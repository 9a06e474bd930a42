"""What of a model is on one rank: its share of blocks and parameters, and what one token leaves in
each block. `memory.py` adds it up.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from typing import NamedTuple

import numpy as np

from paceline.estimate.inputs import Holdings, Model
from paceline.estimate.on_stage import stage_blocks
from paceline.estimate.recompute import OneBlock, deferred_on_rank, kept_on_rank
from paceline.estimate.sharding import RoutedSplit, Shared, routed_split, shared_of
from paceline.parallel.stages import rank_of_head
from paceline.parallel.table import Layouts, code_of
from paceline.profile.adapter import NF4_AT_ONCE
from paceline.profile.block import (
    Block,
    Column,
    Value,
    dense_parameters,
    expert_parameters,
    matrices,
)
from paceline.profile.saved import saved_bytes

_RESTORING_BYTES = 6.0
"""Bytes that restoring takes for each value of the part of a matrix that is restored at once: its
code in int32, half of one, and its value in float32."""

_CROSSING_TENSORS = 2
"""Whole gradients while a block goes backward: a sum over matrices, and the term that is added.
Read off traces of `paceline prove`."""

_ULYSSES = code_of("context_kind", "ulysses")


class BlockOnRank(NamedTuple):
    """What one block of a kind keeps on a rank that has it."""

    block: Block
    kept: Column
    """Bytes that one token leaves."""

    again: Column
    """Bytes of one token that are recomputed, while the block goes backward."""

    peak: Column
    """Bytes of one token that are alive besides then."""

    deferred: Column
    """The part of `kept` that waits for the second half of a split backward pass."""


class EveryRank(NamedTuple):
    """What does not depend on the stage."""

    blocks: tuple[BlockOnRank, ...]
    is_staged: bool
    tokens: Column
    """Tokens of a micro-batch on one rank."""

    stream: Column
    """Tensor ranks that share what is between matrices: 1 without sequence parallelism."""

    unit: Column
    """Parameters of the largest block."""

    restored: Column
    dummies: Column
    stage_blocks: tuple[Column, Column]
    """Blocks of the slowest and of the last stage."""

    experts: RoutedSplit
    shared: Shared


def on_every_rank(model: Model, t: Layouts, h: Holdings) -> EveryRank:
    stream = np.where(t.sequence_parallel, t.tensor, 1)
    is_staged = bool(np.any(t.pipeline > 1))
    experts = routed_split(t, h.ways)
    # What crosses between tensor ranks is whole: in a pipeline also what a stage gave and receives.
    crossing = _CROSSING_TENSORS * whole_share(h, stream) * h.kernels.compute_bytes
    others = h.ways.gathers_context * (t.context - 1) * (t.context_kind != _ULYSSES)
    unit, blocks = np.asarray(0.0), []
    for block in model.blocks:
        size = dense_parameters(block) / t.tensor + expert_parameters(block) / experts.holders
        unit = np.maximum(unit, size * (np.asarray(block.count) > 0))
        one = OneBlock(block, model, t, h, stream)
        widths = block.kv_heads * (block.head_dim + block.value_dim)
        inside = saved_bytes(block, h.kernels, model.seq_len / t.context).peak
        inside = inside + others * h.kernels.compute_bytes * widths
        kept, again = kept_on_rank(one)
        blocks.append(
            BlockOnRank(
                block=block,
                kept=kept,
                again=again,
                peak=inside / t.tensor + crossing * block.hidden,
                deferred=deferred_on_rank(one) if is_staged else np.asarray(0.0),
            )
        )
    return EveryRank(
        blocks=tuple(blocks),
        is_staged=is_staged,
        tokens=t.micro_batch * model.seq_len / t.context,
        stream=stream,
        unit=unit,
        restored=_restored(model, t, h),
        dummies=_dummy_bytes(model, t) * h.dummy_gradients,
        stage_blocks=stage_blocks(model, t),
        experts=experts,
        shared=shared_of(t, h.ways, h.master_bytes),
    )


def whole_share(h: Holdings, stream: Column) -> Column:
    """The share of what crosses between tensor ranks that the other ranks have."""
    return h.ways.crosses_apart * (1 - 1 / stream)


class OnRank(NamedTuple):
    """What of the model is on one rank of the pipeline, and what the layouts share."""

    stage: Value
    has_head: Column
    is_v: Column
    """Whether the first rank has the last stage too."""

    block_share: Column
    """Blocks on it as a share of all; kinds are taken to be mixed evenly."""

    root: Column
    """Parameters outside the blocks, before sharding."""

    twin: Column
    """Parameters of a tied matrix that has a second place on the rank: FSDP2 shards, gathers and
    differentiates each place by itself (`runtime/strategy/pipeline/tied.py`)."""

    dense: Column
    """All parameters before sharding but routed ones and the twin. Stages round up."""

    routed: Column
    unit: Column
    """Parameters of the largest block."""

    trained_share: Value
    """Parameters with a gradient as a share of all: 1, or nearly 0 with adapters."""

    experts: RoutedSplit
    shared: Shared


def on_rank(model: Model, t: Layouts, h: Holdings, everywhere: EveryRank, stage: Value) -> OnRank:
    """In a v both ends are on the first rank, and a tied matrix is there once, or as a twin."""
    head_rank = rank_of_head(t.pipeline, t.schedule, t.chunks)
    is_first, has_head = np.asarray(stage) == 0, np.asarray(stage) == head_rank
    head = model.num_head_parameters + (head_rank > 0) * model.num_tied_parameters
    root = (is_first * model.num_embedding_parameters + has_head * head) / t.tensor
    is_v = (head_rank == 0) & (t.pipeline > 1)
    twin: Column = np.asarray(0.0)
    if np.any(model.num_tied_parameters):
        has_twin = is_first & is_v & (np.asarray(everywhere.shared.shards_weights) > 0)
        twin = h.ways.fsdp_throughout * has_twin * model.num_tied_parameters / t.tensor
    slow, last = everywhere.stage_blocks
    total = sum(np.asarray(each.count, float) for each in model.blocks)
    # The first rank, which holds the most micro-batches, has the fewest of the others, unless ranks
    # are filled from the first one.
    fewest = np.floor((total - last) / np.maximum(t.pipeline - 1, 1))
    mine = np.where(is_first & (np.asarray(h.ways.fills_first) == 0), fewest, slow)
    share = np.where(has_head, last, mine) / np.maximum(total, 1)
    dense = sum(block.count * dense_parameters(block) for block in model.blocks)
    routed = sum(block.count * expert_parameters(block) for block in model.blocks)
    return OnRank(
        stage=stage,
        has_head=has_head,
        is_v=is_v,
        block_share=share,
        root=root,
        twin=twin,
        dense=share * dense / t.tensor + root,
        routed=share * routed / everywhere.experts.holders,
        unit=everywhere.unit,
        trained_share=np.where(np.asarray(h.is_frozen) > 0, model.trained_share, 1.0),
        experts=everywhere.experts,
        shared=everywhere.shared,
    )


def routed_shard(t: Layouts, here: OnRank) -> Column:
    """Ranks that share the state of one copy of a rank's routed experts."""
    return np.maximum(t.shard * here.experts.replicas // t.expert, 1)


def _restored(model: Model, t: Layouts, h: Holdings) -> Column:
    """The largest quantised matrix in the type that it is multiplied in, while it is, and what
    restoring a part of it takes: in our own runtime, which frees it again."""
    is_restored = h.ways.restores_frozen * (np.asarray(h.frozen_block_bytes) < h.frozen_bytes)
    largest = np.asarray(0.0)
    for block in model.blocks:
        for matrix in matrices(block):
            parts = 1 + (matrix.name == "key_value") + (matrix.name == "up") * block.gated
            ranks = 1 if matrix.split == "whole" else t.tensor
            size = matrix.inputs * matrix.outputs / parts / ranks * (block.count > 0)
            largest = np.maximum(largest, size)
    part = np.minimum(largest, NF4_AT_ONCE)
    return np.asarray(is_restored * (h.gathered_bytes * largest + _RESTORING_BYTES * part))


def _dummy_bytes(model: Model, t: Layouts) -> Column:
    """One bf16 buffer for each shape of weight gradient.

    Source: TransformerEngine `get_dummy_wgrad`: it is the whole 4.5 % that
    Megatron's own formula lacks on 31 measured rows.
    """
    total = np.asarray(0.0)
    for block in model.blocks:
        for matrix in matrices(block):
            if matrix.split == "whole" or matrix.is_routed:
                continue
            total = total + 2.0 * matrix.inputs * matrix.outputs / t.tensor * (block.count > 0)
    return total
