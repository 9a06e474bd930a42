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

Routed experts that are not shared among expert ranks are split by expert over its tensor ranks;
those that are, each tensor rank holds whole (`runtime/strategy/expert/split.py`).
"""

from typing import Any, NamedTuple

import numpy as np

from paceline.parallel.table import Layouts, code_of
from paceline.profile.block import Value

Column = Any
"""An array with one entry a row, as it broadcasts; numpy's types cannot say it."""

_ZERO1, _ZERO2, _FULL, _HYBRID = (
    code_of("sharding", word) for word in ("zero1", "zero2", "full", "hybrid")
)


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

    reduces_late: Column
    """Gradients are reduced when the last backward pass is over: nothing hides it."""


def shared_of(t: Layouts, own_runtime: Value, keeps_master: Value) -> Shared:
    """What each layout holds.

    Args:
        t: Layouts.
        own_runtime: 1 where Paceline's own runtime runs the step.
        keeps_master: 1 where float32 copies are held besides the weights: the weights then stay
            whole in ZeRO-2, elsewhere it is FSDP's.
    """
    s = t.sharding
    own, has_master = np.asarray(own_runtime) > 0, np.asarray(keeps_master) > 0
    is_sharded = (s > 0) & (t.shard > 1)
    is_full, once = (s == _FULL) | (s == _HYBRID), (s == _ZERO1) | (s == _ZERO2)
    in_pipeline = own & (t.pipeline > 1)
    several = t.accumulation > 1
    waits = is_full & several & np.logical_not(t.reduce_every_micro_batch)
    waits_ours = ((s == _ZERO1) & several) | waits | in_pipeline | np.logical_not(is_sharded)
    zero2 = (s == _ZERO2) & ~has_master
    is_replica = (s == 0) & (t.data * t.context > 1) & (t.tensor * t.pipeline * t.expert == 1)
    return Shared(
        shards_weights=np.where(own, is_sharded, is_full | zero2),
        keeps_gathered=np.where(own, is_sharded & (once | in_pipeline), zero2),
        gathers_blocks=is_full & ~in_pipeline,
        whole_gradients=np.where(own, waits_ours, (s < _ZERO2) | waits),
        has_buckets=own & several & is_replica,
        reduces_late=in_pipeline,
    )


def expert_ranks(t: Layouts, own_runtime: Value) -> Column:
    """Ranks that hold one copy of the routed experts, before sharding."""
    by_tensor = (np.asarray(own_runtime) > 0) & (np.asarray(t.expert) == 1)
    return t.expert * np.where(by_tensor, t.tensor, 1)
