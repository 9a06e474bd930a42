"""Where a tensor crosses between regions of a model split over the tensor ranks.

In a region the ranks hold one of three things: the same tensor (whole), their share of its tokens
(tokens split), or a term of a sum (partial). Each function is one crossing, its backward pass the
mirrored one. Source: Megatron-LM's f and g (arXiv:1909.08053, section 3) and their forms with
sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2).

Tokens are the last dim but one: `hidden_BSH`, or `hidden_TH` where a model flattens the batch. A
share is contiguous; the tokens must divide over the ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError
from paceline.parallel.layout_laws import check_token_shares
from paceline.runtime._torch_private import FUNCTIONAL, UNSAFE_VIEW

TOKENS = -2
"""The dim of tokens, from the end."""


def copy_to(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Pass a tensor to a computation whose ranks each give a part of its gradient."""
    return _cross(whole, group, _same, _sum)


def reduce_from(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, the same on all of them; so is its gradient."""
    return _cross(partial, group, _sum, _given)


def gather_from(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens, from every rank's share; the ranks each give a part of the gradient."""
    return _cross(share, group, _gather, _scatter)


def scatter_to(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of the sum over the ranks."""
    return _cross(partial, group, _scatter, _gather)


def keep_share(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of a tensor that all ranks hold; its gradient is whole again."""
    return _cross(whole, group, _own_share, _gather)


def join_shares(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens, for a computation that every rank repeats: its gradient is the same on all."""
    return _cross(share, group, _gather, _packed_share)


def sum_everywhere(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, for ranks that compute different things with it."""
    return _cross(partial, group, _sum, _sum)


_Way = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _Crossing(torch.autograd.Function):
    """One way forward, and for the gradient another one back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, to: _Way, back: _Way) -> Tensor:
        ctx.group, ctx.back = group, back
        return to(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None


def _cross(tensor: Tensor, group: dist.ProcessGroup, to: _Way, back: _Way) -> Tensor:
    result: Tensor = _Crossing.apply(tensor, group, to, back)  # type: ignore[no-untyped-call]
    return result


def _same(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _given(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    return gradient


def _own_share(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _share(tensor, group).clone()  # a view would keep all tokens alive


def _packed_share(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _share(tensor, group).contiguous()


def _wait(result: Tensor) -> Tensor:
    waited: Tensor = FUNCTIONAL.wait_tensor(result)
    return waited


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _wait(FUNCTIONAL.all_reduce(tensor.contiguous(), "sum", group.group_name))


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Shares along the tokens; the collective itself lays them along the first dim."""
    ranks = group.size()
    shares = _wait(FUNCTIONAL.all_gather_into_tensor(tensor.contiguous(), ranks, group.group_name))
    before, after = tensor.shape[:TOKENS], tensor.shape[TOKENS + 1 :]
    if before.numel() == 1:
        # Not `view`: what a block gives must not be one, or FSDP2's hooks on it are in danger.
        whole: Tensor = UNSAFE_VIEW(shares, (*before, -1, *after))
        return whole
    return torch.cat(shares.chunk(ranks), dim=TOKENS)


def _scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    _check_even(tensor, group)
    ranks = group.size()
    before, after = tensor.shape[:TOKENS], tensor.shape[TOKENS + 1 :]
    if before.numel() == 1:
        shares = tensor.reshape(-1, *after)
    else:
        shares = torch.cat(tensor.chunk(ranks, dim=TOKENS))
    share = _wait(FUNCTIONAL.reduce_scatter_tensor(shares, "sum", ranks, group.group_name))
    return share.view(*before, -1, *after)


def _share(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    _check_even(tensor, group)
    length = tensor.shape[TOKENS] // group.size()
    return tensor.narrow(TOKENS, group.rank() * length, length)


def _check_even(tensor: Tensor, group: dist.ProcessGroup) -> None:
    PacelineError.raise_for(check_token_shares(tensor.shape[TOKENS], group.size()))
