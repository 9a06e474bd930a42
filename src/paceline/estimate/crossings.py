"""Seconds of one block's crossings between tensor ranks, for one micro-batch.

An all-reduce in either pass, or an all-gather and a reduce-scatter, for each attention and
feed-forward layer. Our own runtime does more (`runtime/strategy/tensor`), which is counted here as
`paceline prove` counts its operations:

- Where it autocasts, the residual stream is float32 and is gathered so, and the gradient of what
  was gathered is float32 when it is scattered; the other two crossings are in the narrow type.
  Each matrix then casts the whole input, and its gradient back, and its parameters likewise.
- Query, key and value, gate and up are matrices of their own: the gradients of their input are
  added as wide as it was gathered.
- Collectives lay ranks along the first dim, tokens are the second: with several samples everything
  is copied once for each crossing.
- Selective recompute crosses again, up to the last sum.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from typing import Any, NamedTuple

import numpy as np

from paceline.estimate.collectives import all_gather_s, all_reduce_s
from paceline.estimate.compute import Work
from paceline.estimate.given import Model, Traffic
from paceline.estimate.rates import Rates
from paceline.estimate.sharing import routed_split
from paceline.parallel.table import Layouts
from paceline.profile.block import Block, dense_parameters

Column = Any
"""An array with one entry a row, as it broadcasts; numpy's types cannot say it."""

_WIDE = 4.0
"""Bytes of float32."""

_SPLIT_LOSS_BYTES = 74.0
"""Read and written for each logit in both passes by a loss over split logits, beyond one over whole
logits (`compute._LOSS_BYTES`): torch 2.13's `loss_parallel` is a chain of operations in float32.
Counted in a trace of `paceline prove`: 92 less 18."""


class Crossing(NamedTuple):
    """Seconds of one block and one micro-batch."""

    each_pass: Column
    """On the links, mean of the forward and the backward pass."""

    selective: Column
    """On the links, again with selective recompute."""

    forward_copies: Column
    """Casts and copies beside it, in the forward pass."""

    backward_copies: Column


def crossing_of(
    block: Block, model: Model, work: Work, t: Layouts, rates: Rates, traffic: Traffic
) -> Crossing:
    """What tensor parallelism costs a block."""
    times = _times(block, t, traffic)
    payload = work.element_bytes * work.tokens * block.hidden
    wide = _is_wide(model, t, traffic)
    entered = np.where(wide, _WIDE / work.element_bytes, 1.0)
    mean = (1 + entered) / 2
    gather = all_gather_s(mean * payload, t.tensor, 1, rates)
    summed = all_reduce_s(mean * payload, t.tensor, 1, rates)
    each_pass = np.where(t.tensor > 1, times * np.where(t.sequence_parallel, 2 * gather, summed), 0)
    if not np.any(traffic.ways.crosses_apart) or not np.any(t.tensor > 1):
        none = np.asarray(0.0)
        return Crossing(each_pass, none, none, none)
    last = np.where(
        t.sequence_parallel,
        all_gather_s(payload, t.tensor, 1, rates),
        # Entering costs nothing forward: only the sums, narrow, but for the last.
        times * summed - (times - 1) * all_reduce_s(payload, t.tensor, 1, rates),
    )
    selective = np.where((t.tensor > 1) & (times > 0), each_pass - last, 0.0)
    forward, backward = _copied_bytes(block, work, wide, times)
    second = np.where(t.tensor > 1, traffic.ways.crosses_apart / rates.memory_bytes_per_s, 0.0)
    crossed = work.tokens * block.hidden
    # Autocast casts the parameters, and their gradients back, which are added to those before.
    cast = np.where(wide, _WIDE + work.element_bytes, 0.0)
    added = np.where(wide, 3 * _WIDE * (1 - 1 / t.accumulation), 0.0)
    own = dense_parameters(block) / t.tensor
    return Crossing(
        each_pass,
        traffic.ways.crosses_apart * selective,
        second * (forward * crossed + cast * own),
        second * (backward * crossed + (cast + added) * own),
    )


def split_loss_s(model: Model, work: Work, rates: Rates, traffic: Traffic) -> Column:
    """What a loss over split logits takes beyond one over whole logits, of one micro-batch."""
    logits = work.tokens * model.head_outputs / work.tensor
    seconds = traffic.ways.gathers_head * _SPLIT_LOSS_BYTES * logits / rates.memory_bytes_per_s
    return np.where(np.asarray(work.tensor) > 1, seconds, 0.0)


def _times(block: Block, t: Layouts, traffic: Traffic) -> Column:
    """Layers of a block that are entered and left."""
    has_ffn = np.asarray(block.ffn + block.shared_ffn) > 0
    if np.any(np.asarray(block.experts) > 0):
        # Routed experts take part where they need the tokens of all tensor ranks.
        is_split = routed_split(t, traffic.ways).holders > t.expert
        gathers = np.logical_or(is_split, np.logical_not(t.sequence_parallel))
        has_ffn = has_ffn | ((np.asarray(block.experts) > 0) & gathers)
    attentions = (np.asarray(block.heads) > 0) * 1 + (np.asarray(block.cross_heads) > 0)
    return np.where(np.asarray(block.hidden) > 0, attentions + has_ffn, 0)


def _is_wide(model: Model, t: Layouts, traffic: Traffic) -> Column:
    """Whether blocks are entered in float32: under autocast, that is without shards of weights.
    Beside adapters the embedding is narrow itself."""
    is_sharded = (t.shard > 1) & (t.sharding > 0) | (np.asarray(model.trained_share) < 1)
    is_narrow = np.asarray(traffic.element_bytes) < _WIDE
    return (np.asarray(traffic.ways.autocasts) > 0) & is_narrow & np.logical_not(is_sharded)


def _copied_bytes(block: Block, work: Work, wide: Column, times: Column) -> tuple[Column, Column]:
    """Read and written for each element that crosses, forward and backward."""
    c = work.element_bytes
    entered = np.where(wide, _WIDE, c)
    attention = 3 * (np.asarray(block.heads) > 0)
    matrices = attention + (1 + block.gated) * (np.asarray(block.ffn + block.shared_ffn) > 0)
    casts = np.where(wide, matrices * (_WIDE + c), 0.0)
    adds = 3 * entered * np.maximum(matrices - times, 0)
    is_split = (np.asarray(work.stream) > 1) & (np.asarray(work.samples) > 1)
    laid_out = 2 * times * (entered + c) * is_split
    return casts + laid_out, casts + adds + laid_out
