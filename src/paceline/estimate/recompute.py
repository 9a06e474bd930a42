"""What a block keeps for the backward pass and does again there, by recompute policy: the bytes of
one token and the seconds of one micro-batch, on one rank.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from paceline.choices import Recompute
from paceline.estimate.compute import BlockTimes
from paceline.estimate.inputs import Holdings, Model
from paceline.estimate.rates import Rates
from paceline.estimate.sharding import routed_split
from paceline.parallel.table import Layouts, code_of
from paceline.parallel.word_columns import share_recomputed
from paceline.profile.block import Block, Column
from paceline.profile.saved import (
    SavedBytes,
    deferred_bytes,
    entered,
    saved_bytes,
    saved_input,
    saved_outputs,
    without_modules,
)

_ULYSSES = code_of("context_kind", "ulysses")


class OneBlock(NamedTuple):
    """A block on one rank, and who runs it."""

    block: Block
    model: Model
    t: Layouts
    h: Holdings
    stream: Column
    """Tensor ranks that share what is between matrices: 1 without sequence parallelism."""


class Pass(NamedTuple):
    """Seconds of a block's forward pass, or of what is repeated of it."""

    compute: Column
    tensor: Column
    exchange: Column
    """To the experts' ranks and back."""

    restored: Column
    """What restoring quantised matrices takes."""

    context: Column
    """Between context ranks, as far as nothing hides it, with what merges partial results."""

    tensor_of_part: Column = 0.0
    """Part of `tensor` that a policy which recomputes a part of each block sends again."""

    exchange_of_part: Column = 0.0
    """Its part of `exchange`."""

    context_of_part: Column = 0.0
    """Its part of `context`."""


def kept_on_rank(one: OneBlock) -> tuple[Column, Column]:
    """Bytes that one token leaves in a block, and those that are alive besides while the block goes
    backward, which were recomputed."""
    block, model, t, h, _ = one
    if block.measured is not None:
        whole = np.asarray((block.measured.saved_bytes or 0) / model.seq_len)
    else:
        saved = saved_bytes(block, h.kernels, model.seq_len / t.context)
        whole = _of_rank(saved, one) + _gathered_inputs(one) + _before_exchange(one)
    whole = whole + h.kernels.compute_bytes * (h.scaled_columns / t.tensor + h.scaled_rows)
    kept: Column = whole
    again: Column = np.asarray(0.0)
    for word, keeps in _KEEPS.items():
        is_chosen = t.recompute == code_of("recompute", word)
        its_kept, its_again = keeps(one, whole)
        kept, again = np.where(is_chosen, its_kept, kept), np.where(is_chosen, its_again, again)
    return kept, again


def done_again(forward: Pass, times: BlockTimes, t: Layouts, rates: Rates) -> Pass:
    """Seconds of a block's forward pass that are repeated in the backward pass."""
    again = Pass(*[np.asarray(0.0)] * len(forward))
    for word, does in _DOES.items():
        is_chosen = t.recompute == code_of("recompute", word)
        its = does(forward, times, t, rates)
        again = Pass(*(np.where(is_chosen, *each) for each in zip(its, again, strict=True)))
    return again


def deferred_on_rank(one: OneBlock) -> Column:
    """Kept by one block for one token until the second half of a split backward pass."""
    if one.block.measured is not None:
        return np.asarray(0.0)
    return _of_rank(deferred_bytes(one.block, one.h.kernels), one)


def _keeps_input(one: OneBlock, whole: Column) -> tuple[Column, Column]:
    """The input of one block in so many, whole blocks otherwise."""
    block, t = one.block, one.t
    inputs = 0.0 if block.measured is not None else _of_rank(saved_input(block, one.h.kernels), one)
    num_blocks, every = one.model.num_blocks, t.recompute_every
    share = share_recomputed(every, num_blocks)
    # The last block goes backward first: where it keeps all, others are recomputed when it is gone.
    again = np.where((every == 1) | ((num_blocks - 1) % every == 0), whole, 0.0)
    return share * inputs + (1 - share) * whole, again


def _keeps_outputs(one: OneBlock, whole: Column) -> tuple[Column, Column]:
    """What selective recompute keeps, as the engine understands it.

    Source: Korthikanti et al., arXiv:2205.05198, section 4.3, for the scores alone.
    """
    block, model, t, h, stream = one
    if block.measured is not None:
        return np.asarray(0.0), whole
    seq_len = model.seq_len / t.context
    # What a row-parallel matrix gives is kept before it is summed: whole on every tensor rank.
    sums = (block.heads > 0) * 1 + (block.cross_heads > 0) + (block.ffn + block.shared_ffn > 0)
    terms = h.ways.keeps_sums * h.kernels.compute_bytes * sums * block.hidden
    inputs = (not np.any(h.ways.gathers_again)) * _gathered_inputs(one)
    outputs = saved_outputs(block, h.kernels, seq_len)
    # Of a token's copy only what its expert gives is kept, not the exchange before and after.
    ends = 1 + h.ways.repeats_exchange * (h.kernels.routed_ends - 1)
    outputs = outputs._replace(routed_ends=outputs.routed_ends / ends)
    kept = _of_rank(outputs, one) + inputs
    kept = kept + terms * (1 - 1 / stream)
    if not np.all(np.asarray(h.selective_cheap) > 0):
        scores = _of_rank(without_modules(block, h.kernels, seq_len), one) + _gathered_inputs(one)
        kept = np.where(np.asarray(h.selective_cheap) > 0, kept, scores)
    return kept, whole - kept


_KEEPS: Mapping[Recompute, Callable[[OneBlock, Column], tuple[Column, Column]]] = {
    "selective": _keeps_outputs,
    "full": _keeps_input,
}


def _does_part(forward: Pass, times: BlockTimes, _: Layouts, rates: Rates) -> Pass:
    return Pass(
        compute=times.selective,
        tensor=forward.tensor_of_part,
        exchange=forward.exchange_of_part,
        restored=forward.restored,
        context=forward.context_of_part,
    )


def _does_whole(forward: Pass, _: BlockTimes, t: Layouts, __: Rates) -> Pass:
    return Pass(*(each / t.recompute_every for each in forward))


_DOES: Mapping[Recompute, Callable[[Pass, BlockTimes, Layouts, Rates], Pass]] = {
    "selective": _does_part,
    "full": _does_whole,
}


def _of_rank(saved: SavedBytes, one: OneBlock) -> Column:
    """This rank's part of what one token leaves in one block."""
    block, _, t, h, stream = one
    split = routed_split(t, h.ways)
    # Ranks with different experts have a row for every token, those of others' experts too.
    rows = np.where(split.ranks > t.expert, 1, stream)
    ends = saved.routed_ends / np.where(split.width > 1, 1, rows)
    routed = block.experts_per_token * (saved.routed / rows + ends)
    return np.asarray(saved.tensor / t.tensor + saved.sequence / stream + routed)


def _before_exchange(one: OneBlock) -> Column:
    """What Ulysses' attention gives, which its kernel keeps, beside the same as exchanged back."""
    block, t, h = one.block, one.t, one.h
    is_exchanged = (t.context > 1) & (t.context_kind == _ULYSSES)
    width = block.heads * block.value_dim / t.tensor
    return np.asarray(is_exchanged * h.kernels.compute_bytes * width)


def _gathered_inputs(one: OneBlock) -> Column:
    """Inputs of linears as tensor parallelism gathered them, beside this rank's own part."""
    block, t, h = one.block, one.t, one.h
    attention, ffn = entered(block, h.kernels)
    is_dense = (block.ffn + block.shared_ffn > 0) * 1
    inputs = attention + ffn * np.maximum(is_dense, routed_split(t, h.ways).ranks > t.expert)
    share = h.gathered_inputs * (1 - 1 / one.stream)
    return np.asarray(share * inputs * h.kernels.compute_bytes * block.hidden)
