"""Ulysses: the ranks of a sample exchange tokens for heads, attend, and exchange back.

Each rank holds a run of consecutive tokens with all heads; during attention it holds all tokens
with its share of the heads, so any attention kernel will do. Source: Jacobs et al.,
arXiv:2309.14509.

Exchanges are `_c10d_functional.all_to_all_single` to a dispatch mode: four forward (query, key,
value, output) and four backward.

Letters in tensor names:
    B  samples    N  query heads (K: key and value heads)    S  tokens of this rank    D  head width
    W  ranks that share a sample    T  tokens of the whole sample, W x S
"""

from functools import partial
from math import lcm
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.runtime._torch_private import FUNCTIONAL
from paceline.runtime.strategy.context.documents import apart_attention, current, fused_attention


class Scores(TypedDict, total=False):
    """How a query's scores are made; what is left out is as usual."""

    is_causal: bool
    """Whether a token sees only itself and earlier ones, as it does when left out."""

    scale: float | None
    """Factor of the scores; 1 / sqrt(D) when None."""

    dropout: float
    """Share of the attention weights that is dropped; 0 outside training."""

    window: int | None
    """How many tokens a token sees, itself included; None is all."""

    softcap: float | None
    """Scores are kept below this by a tangens hyperbolicus; None leaves them as they are."""


def ulysses_attention(
    query_BNSD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    group: dist.ProcessGroup,
    **scores: Unpack[Scores],
) -> Tensor:
    """Attention of this rank's tokens to all tokens of the sample, `output_BNSD`.

    Where the ranks do not divide the key and value heads, these are repeated until they do, and
    the gradients of the copies are added up. Collective: every rank of the group calls it, and
    calls backward, in the same order.

    Args:
        query_BNSD: Of this rank's tokens. N is a multiple of the ranks and of K.
        group: The ranks that share the sample, in the order of their tokens.
    """
    times = lcm(key_BKSD.shape[1], group.size()) // key_BKSD.shape[1]
    if times > 1:
        key_BKSD = key_BKSD.repeat_interleave(times, dim=1)
        value_BKSD = value_BKSD.repeat_interleave(times, dim=1)
    output = whole_attention(
        _tokens_for_heads(query_BNSD, group),
        _tokens_for_heads(key_BKSD, group),
        _tokens_for_heads(value_BKSD, group),
        **scores,
    )
    return _heads_for_tokens(output, group)


def whole_attention(
    query_BNTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    **scores: Unpack[Scores],
) -> Tensor:
    """Attention where all tokens are on this rank; in packed samples, of each document alone.

    torch's own, except with a softcap.
    """
    heads = query_BNTD, key_BKTD, value_BKTD
    documents = current()
    is_shaped = scores.get("window") is not None or scores.get("softcap") is not None
    if documents is not None and not is_shaped and not scores.get("dropout"):
        fused = fused_attention(
            *heads,
            documents,
            is_causal=scores.get("is_causal", True),
            scale=scores.get("scale"),
        )
        if fused is not None:
            return fused
    attend = partial(_attention, **scores)
    return attend(*heads) if documents is None else apart_attention(*heads, documents, attend)


def _attention(
    query_BNTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    num_tokens = query_BNTD.shape[2]
    is_shared = query_BNTD.shape[1] != key_BKTD.shape[1]
    seen_TT = None
    if window is not None and window < num_tokens:
        ones_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=query_BNTD.device)
        seen_TT = ones_TT.triu(1 - window)
        seen_TT = seen_TT.tril() if is_causal else seen_TT.tril(window - 1)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query_BNTD,
            key_BKTD,
            value_BKTD,
            attn_mask=seen_TT,
            dropout_p=dropout,
            is_causal=is_causal and seen_TT is None,
            scale=scale,
            enable_gqa=is_shared,
        )
    times = query_BNTD.shape[1] // key_BKTD.shape[1]
    key_BNTD = key_BKTD.repeat_interleave(times, dim=1)
    value_BNTD = value_BKTD.repeat_interleave(times, dim=1)
    scale = query_BNTD.shape[-1] ** -0.5 if scale is None else scale
    scores_BNTT = softcap * torch.tanh(query_BNTD @ key_BNTD.mT * (scale / softcap))
    if is_causal and seen_TT is None:
        seen_TT = torch.ones_like(scores_BNTT[0, 0], dtype=torch.bool).tril()
    if seen_TT is not None:
        scores_BNTT = scores_BNTT.masked_fill(~seen_TT, -torch.inf)
    wide = torch.promote_types(scores_BNTT.dtype, torch.float32)
    weights_BNTT = F.dropout(scores_BNTT.softmax(-1, dtype=wide), dropout)
    return weights_BNTT.to(value_BNTD.dtype) @ value_BNTD


def _tokens_for_heads(heads_BNSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of this rank's tokens -> this rank's heads of all tokens."""
    world = group.size()
    parts_WBnSD = torch.unflatten(heads_BNSD, 1, (world, -1)).movedim(1, 0)
    got_WBnSD = _exchanged(parts_WBnSD, group)
    return got_WBnSD.movedim(0, 2).flatten(2, 3)


def _heads_for_tokens(heads_BnTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    world = group.size()
    parts_WBnSD = torch.unflatten(heads_BnTD, 2, (world, -1)).movedim(2, 0)
    got_WBnSD = _exchanged(parts_WBnSD, group)
    return got_WBnSD.movedim(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    exchanged: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Part w goes to rank w; its gradient comes back the same way, by the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sizes = [len(parts) // group.size()] * group.size()
    coming = FUNCTIONAL.all_to_all_single(parts.contiguous(), sizes, sizes, group.group_name)
    arrived: Tensor = FUNCTIONAL.wait_tensor(coming)
    return arrived
