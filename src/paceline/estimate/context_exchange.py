"""Seconds of one block's exchanges between context ranks, for one micro-batch.

Ring: keys and values pass every rank once forward and, with their gradients, twice backward, each
pass behind the attention of the keys that are there, as far as that lasts (or all keys and values
are gathered); then partial results are merged. Ulysses: four exchanges in either pass.

Our own ring (`runtime/strategy/context/ring.py`) adds up in float32: so its gradients travel, one
step behind their keys and so once more, after everything else. What it reads and writes is counted
here operation by operation, in bytes of an element of the queries, and of the keys and values.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from typing import NamedTuple

import numpy as np

from paceline.estimate.collectives import all_gather_s, all_to_all_s, p2p_s
from paceline.estimate.compute import BlockTimes, Work
from paceline.estimate.rates import Rates
from paceline.estimate.sharding import Ways
from paceline.parallel.table import Layouts, code_of
from paceline.profile.block import Block, Column, Value

_ULYSSES = code_of("context_kind", "ulysses")

_WIDE = 4.0
"""Bytes of float32."""

_MERGE_PASSES = 3.0
"""Times that a ring step goes through the output (forward), the gradient of the queries and those
of keys and values (backward): a partial result is read and added to what is there. Source:
NVIDIA/TransformerEngine, attention/dot_product_attention/context_parallel.py,
flash_attn_fwd_out_correction and the sums of dq and dkv in the backward pass."""

_STEP_SHARE = 0.75
"""Share of a causal ring's later steps computed: half take all queries and half of the keys,
half the reverse."""


class Exchanged(NamedTuple):
    """Seconds of one block and one micro-batch that nothing hides."""

    forward: Column
    backward: Column
    selective: Column
    """Again with selective recompute."""


class _Ring(NamedTuple):
    """A ring's seconds: on the links, as far as attention does not hide them, and its sums."""

    forward: Column
    backward: Column
    merged: Column
    """Partial results, in the forward pass."""

    summed: Column
    """Gradients, in the backward pass."""


def context_of(
    block: Block, work: Work, t: Layouts, rates: Rates, times: BlockTimes, ways: Ways
) -> Exchanged:
    """What context parallelism costs a block."""
    none = np.asarray(0.0)
    if not np.any(np.asarray(t.context) > 1):
        return Exchanged(none, none, none)
    key_value = block.kv_heads * (block.head_dim + block.value_dim) + (
        np.asarray(block.kv_rank) > 0
    ) * (block.kv_rank + block.rope_dim)
    query = block.heads * block.head_dim
    size = _Size(work.tokens / t.tensor * query, work.tokens / t.tensor * key_value)
    e, steps = work.element_bytes, t.context - 1
    once, wide = (
        p2p_s(each * size.key_value, t.tensor * t.context, rates, crossing=t.tensor)
        for each in (e, _WIDE)
    )
    ring = _ring(once, size, e, t, rates, times)
    if np.any(ways.gathers_context):
        gather = all_gather_s(e * size.key_value * t.context, t.context, t.tensor, rates)
        ring = _chosen(ways.gathers_context, _gathered(ring, gather, once, t, times), ring)
    if np.any(ways.rings_wide):
        own = _wide_ring(once, wide, size, e, t, rates, times)
        ring = _chosen(ways.rings_wide, own, ring)
    ulysses = all_to_all_s(e * (2 * size.query + size.key_value), t.context, t.tensor, rates)
    is_ring = t.context_kind != _ULYSSES
    forward = np.where(is_ring, ring.forward + ring.merged, ulysses)
    backward = np.where(is_ring, ring.backward + ring.summed, ulysses)
    # Where attention's output is kept, nothing hides what is sent for it again.
    again = np.where(is_ring, steps * once + ring.merged, ulysses)
    selective = np.where(
        np.asarray(ways.rings_wide) > 0, again, rates.selective_attention * forward
    )
    is_split = t.context > 1
    return Exchanged(*(np.where(is_split, each, 0.0) for each in (forward, backward, selective)))


class _Size(NamedTuple):
    """Elements on one rank."""

    query: Column
    key_value: Column


def context_ops(t: Layouts, ways: Ways) -> tuple[Column, Column]:
    """Operations in either pass that our own runtime launches beyond attention's one.

    Ring, forward: three to join keys and values, three for the first part, seven for each other,
    one to narrow the end; backward: three and two zeros, four for each part, three to narrow.
    Ulysses: each of four exchanges is laid out before and after, and joined heads of gradients are.
    """
    is_own = (t.context > 1) & (np.asarray(ways.rings_wide) > 0)
    is_ulysses = t.context_kind == _ULYSSES
    forward = np.where(is_ulysses, 8.0, 7.0 * t.context - 1)
    return is_own * forward, is_own * np.where(is_ulysses, 12.0, 4.0 * t.context + 7)


def _chosen(where: Value, one: _Ring, other: _Ring) -> _Ring:
    is_chosen = np.asarray(where) > 0
    return _Ring(*(np.where(is_chosen, *each) for each in zip(one, other, strict=True)))


def _ring(
    once: Column, size: _Size, e: Value, t: Layouts, rates: Rates, times: BlockTimes
) -> _Ring:
    steps = t.context - 1
    # The first of as many steps as there are ranks needs no other rank's keys, and hides a pass.
    behind = steps / t.context
    added = _MERGE_PASSES * e * steps / rates.memory_bytes_per_s
    return _Ring(
        forward=np.maximum(steps * once - behind * times.attention, 0.0),
        backward=np.maximum(2 * steps * once - behind * times.attention_backward, 0.0),
        merged=added * size.query,
        summed=added * (size.query + size.key_value),
    )


def _gathered(ring: _Ring, gather: Column, once: Column, t: Layouts, times: BlockTimes) -> _Ring:
    """All keys and values are gathered at once in either pass, behind the attention of those that
    are there; their gradients travel round."""
    steps, back = t.context - 1, times.attention_backward
    return ring._replace(
        forward=np.maximum(gather - times.attention / t.context, 0.0),
        backward=np.maximum(gather - back / t.context, 0.0)
        + np.maximum(steps * (once - back / t.context), 0.0),
    )


def _wide_ring(
    once: Column, wide: Column, size: _Size, e: Value, t: Layouts, rates: Rates, times: BlockTimes
) -> _Ring:
    """Our own ring: of W ranks W - 1 narrow messages in either pass and W wide ones backward."""
    query, key_value = size
    steps, parts = t.context - 1, _STEP_SHARE * (t.context - 1)
    # Keys and values are laid out and joined in one buffer. Each part is widened (the first is
    # copied so), later ones are mixed in: three elements of float32. The end is narrowed.
    joined = 4 * e * key_value
    merged = joined + query * ((2 + parts) * (e + _WIDE) + 3 * parts * _WIDE)
    # Sums begin at zero, each part is added (sum read and written), and the end is narrowed.
    added = _WIDE + (1 + parts) * (e + 2 * _WIDE) + e + _WIDE
    summed = joined + added * (query + key_value)
    merged, summed = (each / rates.memory_bytes_per_s for each in (merged, summed))
    hides = (times.attention + merged) / t.context
    hides_back = (times.attention_backward + summed) / t.context
    # Gradients go out after their step: beside the keys of the next but one, and last alone.
    back = np.maximum(once - hides_back, 0.0) + np.maximum(wide - hides_back, 0.0) + wide
    both = np.maximum(once + wide - hides_back, 0.0)
    return _Ring(
        forward=steps * np.maximum(once - hides, 0.0),
        backward=back + (steps - 1) * both,
        merged=merged,
        summed=summed,
    )
