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

from typing import Any, NamedTuple

import numpy as np

from paceline.catalog.engines import ROUTED_SPLITS
from paceline.parallel.table import Layouts, code_of
from paceline.profile.block import Value

Column = Any
"""An array with one entry a row, as it broadcasts; numpy's types cannot say it."""

_ZERO1, _ZERO2, _FULL, _HYBRID = (
    code_of("sharding", word) for word in ("zero1", "zero2", "full", "hybrid")
)
_WIDTH, _ALWAYS_WIDTH, _EXPERT = (
    ROUTED_SPLITS.index(word) for word in ("width", "always width", "expert")
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


def routed_split(t: Layouts, how: Value, folds: Value) -> RoutedSplit:
    """How an engine divides the routed experts of these layouts.

    Args:
        t: Layouts.
        how: Place in `ROUTED_SPLITS` of what its tensor ranks divide.
        folds: 1 where tensor ranks that hold the same experts are among their replicas.
    """
    how, is_alone = np.asarray(how), np.asarray(t.expert) == 1
    by_width = ((how == _WIDTH) & is_alone) | (how == _ALWAYS_WIDTH)
    by_expert = (how == _EXPERT) & is_alone
    is_folded = (np.asarray(folds) > 0) & ~by_width & ~by_expert
    return RoutedSplit(
        ranks=t.expert * np.where(by_expert, t.tensor, 1),
        width=np.where(by_width, t.tensor, 1),
        replicas=np.where(is_folded, t.tensor, 1),
    )
