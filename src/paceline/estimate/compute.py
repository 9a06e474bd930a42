"""Seconds that one rank computes: the blocks of one micro-batch, and the head.

A block is its matrices (a roofline with the shapes' efficiency), its attention, and the elementwise
operations between them, which are bound by memory. Where the host cannot launch kernels as fast as
the device runs them, the host's time counts.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from typing import NamedTuple

import numpy as np

from paceline.estimate.elementwise import Ranks, written_accesses
from paceline.estimate.rates import MatmulRate, Rates
from paceline.estimate.sharding import Ways, shared_of
from paceline.parallel.table import Layouts, code_of
from paceline.profile.block import (
    Block,
    Column,
    Matrix,
    MeasuredCosts,
    Value,
    attention_flops,
    matrices,
    second_shares,
)

_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""Size of the tile that one multiprocessor computes. Source: cuBLAS on Hopper."""

_NUM_OPS, _BACKWARD_OPS = 30, 1.6
"""Operations of one block's forward pass, and of its backward pass for each of those. A guess for
Megatron's unfused layer of 2021; `paceline prove` counts 29 and 49 of our decoder with FSDP2."""

AUTOCAST_OPS = 10
"""Added to the forward pass by autocast's casts of matrices, inputs and gradients. Counted as well:
38 and 68 operations."""

_UNFUSED_SHARE = 0.62
"""Rate of attention's batched products as a share of large matrices'. Ours, set by hand
to the runs of SC21 (arXiv:2104.04473)."""

_UNFUSED_BYTES, _UNFUSED_BACKWARD_BYTES = 12.0, 14.0
"""Read and written for each score: scale, mask, softmax and dropout. Source: as above."""

_CAPPED_BYTES, _CAPPED_BACKWARD_BYTES = 40.0, 42.0
"""Bytes of capped scores as transformers writes them: scale, three operations of the cap, mask,
a softmax in float32, its narrow copy. Counted in `eager_attention_forward` of its 5.23,
models/gemma2/modeling_gemma2.py."""

_FLASH_BACKWARD_FLOPS = 2.5
"""For each of the forward pass: five products instead of two. Source: Dao, arXiv:2307.08691."""


class Work(NamedTuple):
    """What one rank computes at once."""

    tokens: Value
    """Tokens of one micro-batch on one rank: micro-batch x sequence / context."""

    samples: Value
    """Micro-batch."""

    seq_len: Value
    """Tokens of a whole sample."""

    tensor: Value
    stream: Value
    """What divides the residual stream: the tensor degree with sequence parallelism, else 1."""

    routed_stream: Value
    """What divides the tokens that reach a rank's routed experts: as `stream`, but 1 where tensor
    ranks share the width of each expert."""

    context: Value
    expert: Value
    weight_gradients: Value
    """Share of the matrices that get a gradient: 1, or near 0 when only adapters are trained."""

    ring: Value
    """Ranks that keys and values travel round: the attention kernel sees them one rank's part at a
    time. 1 without ring attention."""

    element_bytes: Value = 2.0
    """Bytes of one activation: 4 in fp32."""

    written: Value = 0.0
    """1 where the model is transformers' own code."""


class BlockTimes(NamedTuple):
    """Seconds of one block and one micro-batch."""

    forward: Column
    backward: Column
    selective: Column
    """Part of the forward pass that selective recompute repeats."""

    weight_gradient: Column
    """Part of the backward pass: the gradients of matrices, which zero-bubble schedules put off."""

    attention: Column
    """Part of the forward pass: scores and weighted values, which hide a ring's messages."""

    attention_backward: Column
    device_forward: Column
    """Seconds the device takes for the forward pass, without waiting for the host."""

    device_backward: Column


def matmul_s(rows: Value, inner: Value, columns: Value, rate: MatmulRate) -> Column:
    """One product of (rows x inner) and (inner x columns); 0 where there is nothing to do."""
    m, k, n = np.maximum(rows, 1e-9), np.maximum(inner, 1e-9), np.maximum(columns, 1e-9)
    tiles = np.ceil(m / _TILE_ROWS) * np.ceil(n / _TILE_COLUMNS)
    units = rate.num_multiprocessors
    waves = 1 + rate.wave * (np.ceil(tiles / units) * units / tiles - 1)
    flops = 2.0 * m * k * n
    compute = flops / rate.flops_per_s * waves * (1 + rate.short_k / k)
    moved = rate.operand_bytes * (m * k + k * n) + rate.output_bytes * m * n
    memory = moved / rate.bytes_per_s
    c2, m2 = compute * compute, memory * memory
    seconds = rate.launch_s + np.sqrt(np.sqrt(c2 * c2 + m2 * m2))
    has_work = (np.asarray(rows) > 0) & (np.asarray(inner) > 0) & (np.asarray(columns) > 0)
    return np.where(has_work, seconds, 0.0)


def block_times(block: Block, work: Work, rates: Rates) -> BlockTimes:
    """One block, forward and backward, without communication."""
    if block.measured is not None:
        return _measured_times(block.measured, work, rates)
    forward = weight = inputs = again = np.asarray(0.0)
    for matrix, share in zip(matrices(block), second_shares(block), strict=True):
        if np.ndim(matrix.outputs) == 0 and matrix.outputs == 0:
            continue
        each = _matrix_times(matrix, work, rates)
        forward, inputs, weight = forward + each[0], inputs + each[1], weight + each[2]
        again = again + _again(matrix, share, rates) * each[0]
    weight = weight * work.weight_gradients
    attention, attention_back = _attention_s(block, work, rates)
    is_flash = (np.asarray(rates.is_flash) > 0) & ~_is_capped(block, work)
    cheap, cheap_back = _elementwise_s(block, work, rates)
    device_forward = forward + attention + cheap
    device_backward = inputs + weight + attention_back + cheap_back
    return BlockTimes(
        forward=device_forward,
        backward=device_backward,
        selective=again
        + np.where(is_flash, rates.selective_attention, 1.0) * attention
        + _cheap_again(rates) * cheap,
        weight_gradient=weight,
        attention=attention,
        attention_backward=attention_back,
        device_forward=device_forward,
        device_backward=device_backward,
    )


def launch_times(
    block: Block, rates: Rates, more_ops: Value = 0.0, written: Value = 0.0
) -> tuple[Column, Column]:
    """Seconds in which the host launches a block's forward and its backward pass.

    Args:
        block: Its sizes.
        rates: Of the host.
        more_ops: In the forward pass, besides the usual ones.
        written: 1 where the block is transformers' code.
    """
    num_ops = _NUM_OPS + written * (block.written.ops - _NUM_OPS)
    num_ops = num_ops + more_ops + rates.routed_ops * (np.asarray(block.experts) > 0)
    forward = rates.host_s * num_ops * (np.asarray(block.hidden) > 0)
    return forward, _BACKWARD_OPS * forward


def layout_ops(block: Block, t: Layouts, ways: Ways) -> tuple[Column, Column]:
    """Operations that our own runtime launches in either pass of a block for its layout: where
    tokens go to experts of other ranks, on both sides of what crosses between tensor ranks, and to
    add a later micro-batch's gradient of each parameter to those before, which FSDP2 does at once.

    Counted in traces of `paceline prove` (torch 2.13, transformers 5.23): Mixtral and Qwen3's
    experts; GPT-2 (6 to 12 of `_TENSOR_OPS`), GPT-NeoX, Qwen3 and our own decoder (4).
    """
    if not np.any(ways.autocasts):
        return 0.0, 0.0
    forward = _TENSOR_OPS * (t.tensor > 1)
    once = np.where(t.keeps_shards(), 1.0, 1 / t.accumulation)
    back = forward + _num_tensors(block) * (1 - once)
    if np.any(block.experts):
        spread = (t.expert > 1) * (np.asarray(block.experts) > 0)
        forward, back = forward + _SPREAD_OPS[0] * spread, back + _SPREAD_OPS[1] * spread
    return ways.autocasts * forward, ways.autocasts * back


_SPREAD_OPS, _TENSOR_OPS = (21, 6), 5


def _num_tensors(block: Block) -> Value:
    """Parameters of a block, with a norm before each of two parts."""
    apart = 1 - block.written.joined
    used = sum((np.asarray(each.outputs) > 0) * 1 for each in matrices(block))
    used = used + apart * ((np.asarray(block.heads) > 0) * 1 + block.gated * (block.ffn > 0))
    is_biased = (block.written.norm == 0) * 1
    return (used + 2 + 2 * block.query_key_norm) * (1 + is_biased)


def part_launch_s(block: Block, rates: Rates, launch: Column) -> Column:
    """Seconds in which the host launches again what selective recompute does, of `launch` of a
    forward pass: all but matrices, attention and what leads to the last of them."""
    kept = sum((np.asarray(each.outputs) > 0) * 1 for each in matrices(block)) + 2
    return np.maximum(launch - rates.host_s * kept, 0.0) * (np.asarray(rates.selective_cheap) > 0)


def unit_times(block: Block, t: Layouts, rates: Rates, ways: Ways) -> tuple[Column, Column, Column]:
    """Seconds in which FSDP2's own Python holds the host for a block and micro-batch: in its
    forward and its backward pass, and of the forward pass where that is repeated.

    What is gathered or reduced once a step is spread over the micro-batches. Our own runtime's
    expert ranks have a second unit in each block (`runtime/strategy/data/shard.py`), inside of what
    is recomputed.
    """
    is_sharded = t.keeps_shards() & (np.asarray(rates.host_s) > 0)
    each = ways.side_streams * is_sharded
    shared, once = shared_of(t, ways, 0.0), 1 / t.accumulation
    reduces_each = (t.sharding == _ZERO2) | (t.reduce_every_micro_batch > 0)
    reduces = np.where(reduces_each & ~np.asarray(shared.reduces_late), 1.0, once)
    gathers = np.where(shared.gathers_blocks, 1.0, once)
    forward = HOOK_S["FSDP::pre_forward"] + gathers * HOOK_S["FSDP::all_gather"]
    back = HOOK_S["FSDP::pre_backward"] + reduces * HOOK_S["FSDP::post_backward_reduce"]
    back = back + np.where(shared.gathers_blocks, HOOK_S["FSDP::all_gather"], 0.0)
    inner = ways.fsdp_throughout * (t.expert > 1) * (np.asarray(block.experts) > 0)
    again = each * inner * forward
    return each * forward + again, each * (1 + inner) * back, again


HOOK_S = {
    "FSDP::pre_forward": 0.19e-3,
    "FSDP::pre_backward": 0.18e-3,
    "FSDP::all_gather": 0.29e-3,
    "FSDP::post_backward_reduce": 0.30e-3,
}
"""Processor time of FSDP2's hooks for a block of a decoder: of either pass, and besides for each
gather and each reduction, by the names that torch records for them. Steps with the hooks less ones
without, in full sharding and ZeRO-1, first and later micro-batches; tenth of 60 steps, median of
four runs, torch 2.13 and a process group that sends nothing, AMD EPYC; a block without them takes
0.23 and 0.42 ms there. On CUDA streams and events come to it."""

_ZERO2 = code_of("sharding", "zero2")


def _again(matrix: Matrix, second_share: Value, rates: Rates) -> Value:
    """Share of a matrix that selective recompute multiplies with again."""
    m = rates.modules
    shared = m.shared + m.experts - m.shared * m.experts
    by_module = {"ffn": m.ffn, "shared": shared, "experts": m.experts, "latents": m.latents}
    return rates.second_products * second_share + by_module.get(_MODULE_OF.get(matrix.name, ""), 0)


def selective_flops(block: Block, seq_len: Value, rates: Rates) -> Value:
    """FLOPs of matrices and attention that selective recompute does again, of one sample in one
    block: those whose seconds `BlockTimes.selective` has."""
    used = sum(
        _again(each, share, rates) * each.inputs * each.outputs * each.used
        for each, share in zip(matrices(block), second_shares(block), strict=True)
    )
    attends = np.where(np.asarray(rates.is_flash) > 0, rates.selective_attention, 1.0)
    return 2.0 * used * seq_len + attends * attention_flops(block, seq_len)


_MODULE_OF = {
    "up": "ffn",
    "down": "ffn",
    "shared_up": "shared",
    "shared_down": "shared",
    "expert_up": "experts",
    "expert_down": "experts",
    "query": "latents",
    "key_value_up": "latents",
}


def _cheap_again(rates: Rates) -> Value:
    """Share of a block's elementwise operations that selective recompute does again: all, or with
    modules half of them for the norms, half for a feed-forward and a quarter for the experts'
    activation function alone, which are guesses."""
    m = rates.modules
    inside = np.maximum(np.maximum(m.ffn, m.experts), 0.5 * m.activation)
    return np.maximum(rates.selective_cheap, 0.5 * m.norms + 0.5 * inside)


def _measured_times(costs: MeasuredCosts, work: Work, rates: Rates) -> BlockTimes:
    """A block of which only the FLOPs are known: at a share of the rate of large matrices."""
    forward = np.asarray(
        (costs.forward_flops or 0.0)
        * work.samples
        / (rates.matmul.flops_per_s * _UNKNOWN_BLOCK_SHARE)
    )
    return BlockTimes(
        forward=forward,
        backward=2 * forward,
        selective=rates.selective_cheap * 0.1 * forward + rates.second_products * forward / 2,
        weight_gradient=forward,
        attention=np.asarray(0.0),
        attention_backward=np.asarray(0.0),
        device_forward=forward,
        device_backward=2 * forward,
    )


_UNKNOWN_BLOCK_SHARE = 0.75
"""Rate of a block whose inside is not known, as a share of large matrices'. The median of what is
estimated here for six known models on A100 and H100, 8,192 tokens at a time: 0.36 to 0.92."""


def head_times(
    inputs: Value, outputs: Value, work: Work, rates: Rates
) -> tuple[Column, Column, Column]:
    """Seconds of the output matrix and the loss: forward, backward without the gradients of the
    matrix, and these."""
    n = outputs / work.tensor
    rate = rates.wide_matmul
    forward = matmul_s(work.tokens, inputs, n, rate)
    back = matmul_s(work.tokens, n, inputs, rate)
    weight = matmul_s(inputs, work.tokens, n, rate) * work.weight_gradients
    logits = work.tokens * n / rates.memory_bytes_per_s
    return forward + _LOSS_BYTES * logits, back + _LOSS_BYTES * logits, weight


_LOSS_BYTES = 9.0
"""Read and written for each logit in either pass: cast to float32, maximum, sum of exponentials.
A guess, set by hand: measured cross-entropy reaches .28 to .32 of the memory's bandwidth."""


def _matrix_times(matrix: Matrix, work: Work, rates: Rates) -> tuple[Column, Column, Column]:
    """Forward, gradient of the input, gradient of the matrix."""
    rate = rates.matmul
    tensor: Column = np.asarray(work.tensor, float)
    if matrix.is_routed:
        # Every expert on this rank gets its share of all tokens that the expert group holds; with
        # sequence parallelism the tensor ranks hold different tokens and whole experts, unless
        # they share the width of each.
        local: Column = np.maximum(matrix.copies / work.expert, 1e-9)
        rows = work.tokens / work.routed_stream * matrix.used / local
        spread = tensor / work.routed_stream
        k: Column = matrix.inputs / np.where(matrix.split == "row", spread, 1)
        n: Column = matrix.outputs / np.where(matrix.split == "column", spread, 1)
        # One grouped product: the waves of all experts are filled together.
        return (
            grouped_s(rows, k, n, local, rate, rates),
            grouped_s(rows, n, k, local, rate, rates),
            grouped_s(k, rows, n, local, rates.weight_matmul, rates),
        )
    k = matrix.inputs / (tensor if matrix.split == "row" else 1)
    n = matrix.outputs / (tensor if matrix.split == "column" else 1)
    tokens = work.tokens if matrix.split != "whole" else work.tokens / work.stream
    return (
        matmul_s(tokens, k, n, rate),
        matmul_s(tokens, n, k, rate),
        matmul_s(k, tokens, n, rates.weight_matmul),
    )


def grouped_s(
    rows: Value, inner: Value, columns: Value, count: Value, rate: MatmulRate, rates: Rates
) -> Column:
    """`count` products of one shape in one kernel: one launch."""
    one = matmul_s(rows, inner, columns, rate)
    launch = np.where(one > 0, rate.launch_s, 0.0)
    return (one - launch) * count / rates.grouped_share + launch


def _attention_s(block: Block, work: Work, rates: Rates) -> tuple[Column, Column]:
    """Forward and backward seconds of scores and weighted values."""
    share = work.samples / (work.context * work.tensor)
    flash_flops = attention_flops(block, work.seq_len) * share
    # A ring's first step is a sample of one rank's tokens. Of the others, half multiply all queries
    # by half of another rank's keys, which is as slow, and half do half of them by all its keys.
    shortness = (1 + 0.75 * (work.ring - 1)) / work.ring
    seen = np.asarray(work.seq_len / work.ring / shortness, float)
    at_length = seen / (seen + rates.attention_half_len)
    flash = flash_flops / (rates.attention_flops_per_s * at_length)
    flash_back = _FLASH_BACKWARD_FLOPS * flash / rates.attention_backward
    pairs = work.seq_len * work.seq_len * share * 1.0
    products = 2.0 * pairs * block.heads * (block.head_dim + block.value_dim)
    batched = products / (rates.wide_matmul.flops_per_s * _UNFUSED_SHARE)
    scores = pairs * block.heads / rates.memory_bytes_per_s
    is_capped = _is_capped(block, work)
    passed, passed_back = (
        np.where(is_capped, *each)
        for each in (
            (_CAPPED_BYTES, _UNFUSED_BYTES),
            (_CAPPED_BACKWARD_BYTES, _UNFUSED_BACKWARD_BYTES),
        )
    )
    unfused, unfused_back = batched + passed * scores, 2 * batched + passed_back * scores
    is_flash = (np.asarray(rates.is_flash) > 0) & ~is_capped
    return np.where(is_flash, flash, unfused), np.where(is_flash, flash_back, unfused_back)


def _is_capped(block: Block, work: Work) -> Column:
    """Whether scores are capped, and so written out: no flash kernel of torch does that."""
    return (np.asarray(work.written) > 0) & (block.written.capped > 0)


def _elementwise_s(block: Block, work: Work, rates: Rates) -> tuple[Column, Column]:
    """Norms, residuals, rotary positions, activation functions, routing: bytes over bandwidth."""
    scale = work.element_bytes * work.tokens / rates.memory_bytes_per_s
    if np.any(work.written):
        ranks = Ranks(work.tensor, work.stream, work.routed_stream, work.expert)
        forward, backward = written_accesses(block, ranks)
        return scale * forward, scale * backward
    stream = rates.hidden_passes * block.hidden / work.stream
    widths = (2 + block.gated) * (block.ffn + block.shared_ffn) / work.tensor
    heads = 2 * block.heads * block.head_dim / work.tensor
    routed = block.experts_per_token * (
        4 * block.hidden / work.routed_stream + (2 + block.gated) * block.expert_ffn / work.stream
    )
    elements = stream + rates.ffn_passes * (widths + heads) + routed
    return scale * elements, 2 * scale * elements
