"""What the ranks of each layout hold whole and what in shards, by the software that runs it.

ZeRO-1 and ZeRO-2 are done in two ways. Most engines hold whole parameters beside shards of the
optimizer state. Paceline's own runtime is FSDP2 throughout (`runtime/strategy/data/shard.py`):

==========  ====================  =========================  =================================
sharding    parameters            gathered                   gradients between micro-batches
==========  ====================  =========================  =================================
`none`      whole                 never                      whole
`zero1`     shards                once, kept for the step    whole, shards where there is one
                                                             micro-batch
`zero2`     shards                once, kept for the step    shards
`full`      shards                block by block             whole or shards, as the layout says
`hybrid`    shards of a group     block by block             as `full`
==========  ====================  =========================  =================================

Without sharding and other splits it is DDP, whose buckets hold the gradients a second time while
several micro-batches add up: gradients are set to None after each step, and new ones are no views
of the buckets until the last backward pass (torch 2.13, `reducer.cpp`; `paceline prove` counts it).

In a pipeline it does all of them as `zero1` with several micro-batches, and reduces when the last
backward pass is over: torch's schedules gather a stage's parameters once and reduce once.

Routed experts under tensor parallelism: `RoutedSplit`. Our own runtime gives each tensor rank some
of the experts where no expert ranks share them, and all where they do, as the other tensor ranks
have (`runtime/strategy/expert/split.py`).
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from paceline.catalog.engines import ROUTED_SPLITS, Engine
from paceline.parallel.table import Layouts, code_of
from paceline.profile.block import Column, Value

_ZERO1, _ZERO2, _FULL, _HYBRID = (
    code_of("sharding", word) for word in ("zero1", "zero2", "full", "hybrid")
)
_WIDTH, _ALWAYS_WIDTH, _EXPERT = (
    ROUTED_SPLITS.index(word) for word in ("width", "always width", "expert")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """What an engine does its own way: `ways` of `engines.toml`, 1 or 0, a number or a column."""

    fsdp_throughout: Value = 0.0
    once_in_pipeline: Value = 0.0
    bucket_copies: Value = 0.0
    autocasts: Value = 0.0
    crosses_apart: Value = 0.0
    gathers_head: Value = 0.0
    keeps_sums: Value = 0.0
    sums_experts: Value = 0.0
    launches_ahead: Value = 0.0
    frees_gradients: Value = 0.0
    runs_ahead: Value = 0.0
    side_streams: Value = 0.0
    keeps_outputs: Value = 0.0
    splits_loss: Value = 0.0
    gathers_again: Value = 0.0
    gathers_at_end: Value = 0.0
    all_reduces: Value = 0.0
    replicas_wait: Value = 0.0
    zero1_waits: Value = 0.0
    flat_step: Value = 0.0
    hosts_gradients: Value = 0.0
    hosts_sums: Value = 0.0
    one_copy_a_node: Value = 0.0
    hides_exchange: Value = 0.0
    repeats_exchange: Value = 0.0
    sends_whole: Value = 0.0
    restores_frozen: Value = 0.0
    fills_first: Value = 0.0
    routed_split: Value = 0.0
    """Place in `ROUTED_SPLITS`."""

    folds_experts: Value = 0.0
    rings_wide: Value = 0.0
    gathers_context: Value = 0.0
    wraps_ends: Value = 0.0
    """1 where embedding and output matrix are units by themselves."""


def ways_of(engine: Engine) -> Ways:
    """The facts of one engine."""
    named = {each.name: float(each.name in engine.ways) for each in fields(Ways)}
    named["routed_split"] = float(ROUTED_SPLITS.index(engine.routed_split))
    named["folds_experts"] = float(engine.folds_experts)
    named["gathers_context"] = float(engine.gathers_context)
    named["wraps_ends"] = float(engine.wraps == "blocks and ends")
    return Ways(**named)


class Shared(NamedTuple):
    """Masks, one entry a layout."""

    shards_weights: Column
    """A rank holds a shard of the parameters; what it multiplies with is gathered."""

    keeps_gathered: Column
    """Parameters are gathered once and stay so through the step."""

    gathers_blocks: Column
    """Each block's parameters are gathered before its forward and before its backward pass."""

    whole_gradients: Column
    """Gradients wait whole for the step's last micro-batch."""

    has_buckets: Column
    """Gradients wait beside the buckets they are reduced in."""

    gradients_appear: Column
    """Gradients are freed after a step, and come with its only backward pass, block by block."""

    reduces_late: Column
    """Gradients are reduced when the last backward pass is over: nothing hides it."""


def shared_of(t: Layouts, ways: Ways, keeps_master: Value) -> Shared:
    """What each layout holds.

    Args:
        t: Layouts.
        ways: Of the engine.
        keeps_master: 1 where float32 copies are held besides the weights: the weights then stay
            whole in ZeRO-2, elsewhere it is FSDP's.
    """
    s = t.sharding
    throughout, has_master = np.asarray(ways.fsdp_throughout) > 0, np.asarray(keeps_master) > 0
    is_sharded = t.keeps_shards()
    is_full, once = (s == _FULL) | (s == _HYBRID), (s == _ZERO1) | (s == _ZERO2)
    in_pipeline = (np.asarray(ways.once_in_pipeline) > 0) & (t.pipeline > 1)
    several = t.accumulation > 1
    waits = is_full & several & np.logical_not(t.reduce_every_micro_batch)
    waits_sharded = ((s == _ZERO1) & several) | waits | in_pipeline | np.logical_not(is_sharded)
    zero2 = (s == _ZERO2) & ~has_master
    zero1_waits = (np.asarray(ways.zero1_waits) > 0) & (s == _ZERO1) & (t.offload == 0)
    replicas_wait = (np.asarray(ways.replicas_wait) > 0) & (s == 0)
    staged = (is_full | zero2) & is_sharded & in_pipeline
    is_replica = (s == 0) & (t.data * t.context > 1) & (t.tensor * t.pipeline * t.expert == 1)
    return Shared(
        shards_weights=np.where(throughout, is_sharded, is_full | zero2),
        keeps_gathered=np.where(throughout, is_sharded & (once | in_pipeline), zero2 | staged),
        gathers_blocks=is_full & ~in_pipeline,
        whole_gradients=np.where(throughout, waits_sharded, (s < _ZERO2) | waits | staged),
        has_buckets=(np.asarray(ways.bucket_copies) > 0) & several & is_replica,
        gradients_appear=(np.asarray(ways.frees_gradients) > 0)
        & ~several
        & ~is_replica
        & (t.pipeline == 1),
        reduces_late=in_pipeline | zero1_waits | replicas_wait,
    )


class RoutedSplit(NamedTuple):
    """How ranks divide the routed experts, one entry a layout."""

    ranks: Column
    """Ranks that have different experts."""

    width: Column
    """Tensor ranks that share the width of each expert."""

    replicas: Column
    """Tensor ranks that hold the same experts, and shard their optimizer state together with the
    data ranks."""

    @property
    def holders(self) -> Column:
        """Ranks that hold one copy of all routed experts, before sharding."""
        return self.ranks * self.width


def routed_split(t: Layouts, ways: Ways) -> RoutedSplit:
    """How an engine divides the routed experts of these layouts.

    Args:
        t: Layouts.
        ways: Of the engine.
    """
    how, is_alone = np.asarray(ways.routed_split), np.asarray(t.expert) == 1
    by_width = ((how == _WIDTH) & is_alone) | (how == _ALWAYS_WIDTH)
    by_expert = (how == _EXPERT) & is_alone
    is_folded = (np.asarray(ways.folds_experts) > 0) & ~by_width & ~by_expert
    return RoutedSplit(
        ranks=t.expert * np.where(by_expert, t.tensor, 1),
        width=np.where(by_width, t.tensor, 1),
        replicas=np.where(is_folded, t.tensor, 1),
    )
