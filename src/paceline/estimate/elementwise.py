"""Seconds of a block's operations between its matrices and attention: norms, residuals, positions,
activation functions, routing. Bytes over bandwidth.

Arithmetic on columns: one row a layout, or one row a published run.
"""

from typing import NamedTuple

import numpy as np

from paceline.profile.block import Block, Column, Value


class Accesses(NamedTuple):
    """Times that each pass reads or writes an element, two bytes wide in bf16."""

    forward: float
    backward: float


_NORMS = (Accesses(2, 3), Accesses(18, 46), Accesses(20, 52))
"""One kernel, Llama's chain in float32, Gemma's: `Written.norm`."""

_ROTARY, _PARTED = Accesses(10, 16), Accesses(2, 6)
"""`_PARTED` where part of a head is rotated, and joined with the rest."""

_RESIDUALS = Accesses(6, 6)
_DROPOUTS = Accesses(5, 5)
_GATED, _PLAIN, _PLAIN_MORE = Accesses(5, 9), Accesses(2, 3), Accesses(5.3, 8.3)
"""`_PLAIN_MORE` for each of `Written.activation`."""

_ROUTED_GATE = Accesses(5, 13)
"""Backward, the gradients of gate and up are joined, as experts have them in one matrix."""

_TO_EXPERTS, _SPREAD = Accesses(6, 13), Accesses(8, 5)
"""For a token copy: gathered, weighted, put back and summed, and where it goes to another rank.
`_SPREAD` is the mean of Qwen3's (9 and 7.5), whose weights are bfloat16, and Mixtral's (7 and 2.5).
"""

_INPUT_GRADIENT, _JOINED = 3, 2
"""Backward, for each matrix beside another that takes the same input; and where query, key and
value are one matrix.

All are counted in traces of `paceline prove` (torch 2.13, transformers 5.23, bf16, FSDP2) of Qwen3,
GPT-2, OPT, GPT-NeoX, Gemma 2 (with its capped scores), Mixtral and Qwen3's experts: the list gives
each of these within 8 % but Mixtral, whose experts' weights are float32, 13 % too little.
"""


def written_accesses(block: Block, ranks: "Ranks") -> tuple[Column, Column]:
    """Elements that transformers' code of a block reads or writes for each token, in each pass."""
    h, how = block.hidden, block.written
    query, key = block.heads * block.head_dim, block.kv_heads * block.head_dim
    parts = (block.heads > 0) + (block.cross_heads > 0)
    has_ffn = block.ffn + block.shared_ffn + block.experts > 0
    norms = (parts + has_ffn - block.parallel) * h + block.extra_norm_width
    widths = block.ffn + block.shared_ffn
    rotated = block.rope_dim * (block.heads + 1) or query + key
    copies = block.experts_per_token
    both = []
    for index in (0, 1):
        plain = _PLAIN[index] + how.activation * _PLAIN_MORE[index]
        activated = _GATED[index] if block.gated else plain
        norm = _NORMS[how.norm][index]
        stream = (_RESIDUALS[index] + how.drops * _DROPOUTS[index]) * h + norm * norms
        turned = how.rotated * _ROTARY[index] + (0 < how.rotated < 1) * _PARTED[index]
        inside = activated * widths + turned * rotated
        inside = inside + norm * block.query_key_norm * (query + key)
        ends = _TO_EXPERTS[index] + _SPREAD[index] * (np.asarray(ranks.expert) > 1)
        routed = copies * (
            ends * h / ranks.routed_stream + _ROUTED_GATE[index] * block.expert_ffn / ranks.stream
        )
        both.append(stream / ranks.stream + inside / ranks.tensor + routed)
    apart = (1 - how.joined) * (2 * (block.heads > 0) + block.gated * (widths > 0))
    joined = how.joined * (query + 2 * key) / ranks.tensor
    # Each bias is the sum of a matrix's gradient, which is read. Beside RMSNorm there is none.
    biases = max(block.vector_parameters - 4 * h, 0) * (how.norm == 0)
    more = _INPUT_GRADIENT * apart * h + _JOINED * joined + biases
    return both[0], both[1] + more


class Ranks(NamedTuple):
    """What divides a block's elements; see `compute.Work`."""

    tensor: Value
    stream: Value
    routed_stream: Value
    expert: Value
