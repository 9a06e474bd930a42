"""Seconds of one block's crossings between tensor ranks, for one micro-batch.

An all-reduce in either pass, or an all-gather and a reduce-scatter, for each attention and
feed-forward layer. Our own runtime does more (`runtime/strategy/tensor`), which is counted here as
`paceline prove` counts its operations:

- Query, key and value, gate and up are matrices of their own: the gradients of their input are
  added.
- Collectives lay ranks along the first dim, tokens are the second: with several samples everything
  is copied once for each crossing.
- Selective recompute crosses again, up to the last sum.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from typing import NamedTuple

import numpy as np

from paceline.estimate.collectives import all_gather_s, all_reduce_s
from paceline.estimate.compute import Work
from paceline.estimate.copies import autocasts, cast_inputs_s, copied_parameters_s, matrices_entered
from paceline.estimate.inputs import Model, Traffic
from paceline.estimate.rates import Rates
from paceline.estimate.sharding import routed_split
from paceline.parallel.table import Layouts
from paceline.profile.block import Block, Column, dense_parameters, expert_parameters


class Crossing(NamedTuple):
    """Seconds of one block and one micro-batch."""

    each_pass: Column
    """On the links, mean of the forward and the backward pass."""

    selective: Column
    """On the links, again with selective recompute."""

    forward_copies: Column
    """Casts and copies beside it, in the forward pass."""

    backward_copies: Column
    gradient_copies: Column
    """Part of the copies in the backward pass: gradients of matrices that are cast and added. A
    backward pass in two makes them in its second half."""


def crossing_of(
    block: Block, model: Model, work: Work, t: Layouts, rates: Rates, traffic: Traffic
) -> Crossing:
    """What tensor parallelism costs a block."""
    times = _times(block, t, traffic)
    payload = work.element_bytes * work.tokens * block.hidden
    gather = all_gather_s(payload, t.tensor, 1, rates)
    once = np.where(t.sequence_parallel, 2 * gather, all_reduce_s(payload, t.tensor, 1, rates))
    each_pass = np.where(t.tensor > 1, times * once, 0.0)
    own = dense_parameters(block) / t.tensor
    own = own + expert_parameters(block) / routed_split(t, traffic.ways).holders
    forward, backward = copied_parameters_s(own, model, t, rates, traffic)
    gradients = backward
    cast = autocasts(model, t, traffic) * cast_inputs_s(block, times, work, t, rates)
    forward, backward = forward + cast, backward + cast
    if not np.any(traffic.ways.crosses_apart) or not np.any(t.tensor > 1):
        return Crossing(each_pass, np.asarray(0.0), forward, backward, gradients)
    selective = np.where(times > 0, each_pass - np.where(t.sequence_parallel, gather, once), 0.0)
    is_split = (np.asarray(work.stream) > 1) & (np.asarray(work.samples) > 1)
    laid_out = 4 * times * is_split
    added = 3 * np.maximum(matrices_entered(block) - times, 0)
    second = traffic.ways.crosses_apart * payload / rates.memory_bytes_per_s * (t.tensor > 1)
    return Crossing(
        each_pass,
        traffic.ways.crosses_apart * np.where(t.tensor > 1, selective, 0.0),
        forward + second * laid_out,
        backward + second * (laid_out + added),
        gradients,
    )


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
