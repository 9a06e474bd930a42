"""What of a model is on a stage of its pipeline: blocks of the fullest and the last one, and the
parameters of a typical one.

Arithmetic on columns: one row a layout, or one row a published run.
"""

import numpy as np

from paceline.estimate.inputs import Model, Traffic
from paceline.estimate.schedule import ChunkBlocks
from paceline.estimate.sharding import routed_split
from paceline.parallel.stages import blocks_of_slowest, rank_of_head
from paceline.parallel.table import Layouts
from paceline.parallel.word_columns import stages_each
from paceline.profile.block import Block, Column, Value, dense_parameters, expert_parameters


def stage_blocks(model: Model, t: Layouts) -> tuple[Column, Column]:
    """Blocks of the fullest stage and of the last one; the head weighs as much as its matrix."""
    count = model.num_blocks
    if not np.any(t.pipeline > 1):
        return count, count
    head = head_in_blocks(model)
    # Of several stages on a rank only the one with the head may be bare (`parallel.stages`).
    least = stages_each(t.schedule, t.chunks) - may_be_bare(model)
    return blocks_of_slowest(count, t.pipeline, head, is_balanced=model.is_balanced, least=least)


def blocks_before_head(model: Model, t: Layouts, last: Column) -> Column:
    """Those of the `last` blocks on the rank with the head that its earlier stages have."""
    stages = stages_each(t.schedule, t.chunks)
    head, least = head_in_blocks(model), 1 - may_be_bare(model)
    _, of_head = blocks_of_slowest(last, stages, head, is_balanced=model.is_balanced, least=least)
    return last - of_head


def chunk_blocks(model: Model, t: Layouts, mine: Column, has_head: Column) -> ChunkBlocks:
    """What each stage of a rank has of its blocks; one stage has all."""
    stages = stages_each(t.schedule, t.chunks)
    head = has_head * head_in_blocks(model) * np.asarray(model.is_balanced)
    _, last = blocks_of_slowest(
        mine, stages, head, is_balanced=True, least=1 - may_be_bare(model) * has_head
    )
    others = np.maximum(stages - 1, 1)
    each = np.where(stages > 1, np.floor((mine - last) / others), mine)
    return ChunkBlocks(each, np.where(stages > 1, mine - last - each * others, 0.0), last)


def may_be_bare(model: Model) -> Column:
    """Whether the stage with the head may have no block: beside adapters the head is not trained,
    and an optimizer of nothing is an error."""
    return np.asarray(np.asarray(model.trained_share) == 1)


def head_in_blocks(model: Model) -> Value:
    """Time of the output matrix, in blocks, by the parameters that a token goes through."""
    count = model.num_blocks
    in_blocks = sum(
        block.count * (dense_parameters(block) + _used_parameters(block)) for block in model.blocks
    )
    mean = np.maximum(in_blocks / np.maximum(count, 1), 1)
    return model.head_inputs * model.head_outputs / mean


def _used_parameters(block: Block) -> Value:
    """Parameters of the routed experts that a token goes through."""
    share = block.experts_per_token / np.maximum(block.experts, 1)
    return expert_parameters(block) * share


def stage_parameters(model: Model, t: Layouts, traffic: Traffic) -> tuple[Column, Column]:
    """Parameters of a typical stage on one rank, before sharding: dense ones and routed ones."""
    dense = sum(block.count * dense_parameters(block) for block in model.blocks)
    routed = sum(block.count * expert_parameters(block) for block in model.blocks)
    root = model.num_embedding_parameters + model.num_head_parameters
    # A pipeline keeps embedding and head on different stages; the larger one sets the pace.
    last = model.num_head_parameters + model.num_tied_parameters
    ends = np.maximum(model.num_embedding_parameters, last)
    is_apart = rank_of_head(t.pipeline, t.schedule, t.chunks) > 0
    outside = np.where(is_apart, ends, root)
    routed = routed / t.pipeline / routed_split(t, traffic.ways).holders
    return (dense / t.pipeline + outside) / t.tensor, routed
