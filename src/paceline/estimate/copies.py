"""Seconds that our own runtime spends on copies: of parameters, of what it casts, of logits; and
that any engine spends on copies of what it keeps in host memory.

Counted in traces of `paceline prove` (torch 2.13), a kernel of each, at the bandwidth that
elementwise operations reach:

- Whole parameters are cast by autocast in every micro-batch, and their gradients back and added to
  those before. The residual stream is float32 then, and what enters a matrix is cast: between
  tensor ranks once for all that share an input, without them for each.
- FSDP2 copies gathered parameters out of their buffer before each pass, adds narrow gradients to
  float32 ones, and copies those into a buffer before a reduction.
- The loss is a chain of operations on logits, in float32.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from typing import NamedTuple

import numpy as np

from paceline.estimate.compute import Work
from paceline.estimate.inputs import Model, Traffic
from paceline.estimate.rates import Rates
from paceline.estimate.sharding import shared_of
from paceline.parallel.table import Layouts, code_of
from paceline.profile.block import Block, Column, Value

_WIDE = 4.0
"""Bytes of float32."""

_LOSS_BYTES, _SPLIT_LOSS_BYTES = 18.0, 74.0
"""Read and written for each logit in both passes by this loss, beyond what other engines' does
(`compute._LOSS_BYTES`), and by one over split logits: 36 and 92 less 18."""


def copied_parameters_s(
    own: Value, model: Model, t: Layouts, rates: Rates, traffic: Traffic
) -> tuple[Column, Column]:
    """Forward and backward seconds of so many parameters on a rank, before sharding, for one
    micro-batch."""
    shared = shared_of(t, traffic.ways, 0.0)
    c = np.asarray(traffic.weight_bytes)
    cast = np.where(c < _WIDE, c + _WIDE, 0.0)
    out = np.where(shared.gathers_blocks, 2 * c, 0.0)
    once = 1 / t.accumulation
    arrives = np.where(shared.shards_weights, c, _WIDE)
    added = (1 - once) * (2 * _WIDE + arrives)
    reduced = np.where(shared.whole_gradients, once * (cast + 2 * _WIDE) + added, c + _WIDE)
    forward = np.where(shared.shards_weights, out, cast)
    backward = np.where(shared.shards_weights, reduced, cast + added) * model.trained_share
    backward = backward + np.where(shared.shards_weights, out, 0.0)
    scale = traffic.ways.autocasts * own / rates.memory_bytes_per_s
    return scale * forward, scale * backward


def autocasts(model: Model, t: Layouts, traffic: Traffic) -> Column:
    """Whether a layout multiplies under autocast, with a float32 residual stream: without shards
    of the weights. Beside adapters the embedding is narrow itself."""
    is_sharded = t.keeps_shards() | (np.asarray(model.trained_share) < 1)
    is_narrow = np.asarray(traffic.element_bytes) < _WIDE
    return (np.asarray(traffic.ways.autocasts) > 0) & is_narrow & ~is_sharded


def stream_bytes(model: Model, t: Layouts, traffic: Traffic) -> Column:
    """Bytes of an element of the residual stream, as stages of a pipeline and ranks with different
    experts send it: float32 under autocast, which casts what enters a matrix."""
    return np.where(autocasts(model, t, traffic), _WIDE, traffic.element_bytes)


def cast_inputs_s(block: Block, crossed: Value, work: Work, t: Layouts, rates: Rates) -> Column:
    """Seconds of either pass in which autocast casts the inputs of a block's matrices, or their
    gradients back. Inputs that cross between tensor ranks are cast once for each crossing."""
    times = np.where(t.tensor > 1, crossed, matrices_entered(block))
    moved = times * (work.element_bytes + _WIDE) * work.tokens * block.hidden
    return np.asarray(moved / rates.memory_bytes_per_s)


def matrices_entered(block: Block) -> Column:
    """Matrices of a block that take the residual stream."""
    attention = 3 * (np.asarray(block.heads) > 0)
    return attention + (1 + block.gated) * (np.asarray(block.ffn + block.shared_ffn) > 0)


def own_loss_s(model: Model, work: Work, rates: Rates, traffic: Traffic) -> Column:
    """What this loss takes beyond other engines', of one micro-batch."""
    logits = work.tokens * model.head_outputs / work.tensor
    each = np.where(np.asarray(work.tensor) > 1, _SPLIT_LOSS_BYTES, _LOSS_BYTES)
    return traffic.ways.autocasts * each * logits / rates.memory_bytes_per_s


class HostCopies(NamedTuple):
    """Seconds that offloaded parameters and their gradients take between host and accelerator."""

    to_device_s: Column
    """Before parameters are gathered."""

    to_host_s: Column
    """After gradients are reduced."""

    added_s: Column
    """Each further time in a step that they are: the host adds them to those it has."""


def host_copies(model: Model, shard: Column, t: Layouts, traffic: Traffic) -> HostCopies:
    """Seconds of copies for one rank's `shard` of parameters; 0 where they stay on the accelerator.
    Frozen ones are kept in the type that they are multiplied in."""
    is_disk = t.offload == code_of("offload", "nvme")
    link = np.where(is_disk, traffic.disk_bytes_per_s, traffic.host_bytes_per_s)
    trained = np.asarray(model.trained_share)
    held_bytes = trained * traffic.sharded_bytes + (1 - trained) * traffic.weight_bytes
    moved = t.offload_parameters * shard
    gradients = trained * traffic.reduce_bytes * moved
    return HostCopies(
        to_device_s=held_bytes * moved / link,
        to_host_s=gradients / link,
        added_s=3 * gradients / traffic.host_memory_bytes_per_s,
    )
