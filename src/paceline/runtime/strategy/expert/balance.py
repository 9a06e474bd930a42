"""The balancing loss of routed experts: tokens should not all go to few of them.

    balance_routers(model, layout, meshes, 0.01)     # once, before the model is sharded
    with balanced(model, targets_BS, scale):         # forward and backward of a micro-batch
        ...

Each sample has a balancing loss of its own: what transformers' `load_balancing_loss_func` gives for
the logits of all its routers. In the mean over the global batch a sample weighs as many targets as
it has. So the result is the same whichever ranks and micro-batches the samples are in; transformers
itself takes the samples of one device's micro-batch together, which is the same for one sample.
Tokens after a sample's last target are padding, and left out as by an attention mask.

Only the gradient is added, where a router hands its weights to the experts: the loss that is shown
stays the cross entropy.

Source: arXiv:2101.03961, equations 4 to 6, over all layers at once.

Letters in tensor names:
    B  samples in a micro-batch          T  B x S, tokens of this rank
    S  tokens in a sample                K  experts that a token goes to
    E  experts
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import Coordinates
from paceline.runtime._torch_private import FUNCTIONAL
from paceline.runtime.strategy.chunked import IGNORED
from paceline.runtime.strategy.context.tokens import local_tokens
from paceline.runtime.strategy.mesh import Meshes

ROUTERS = frozenset(
    {
        "GptOssTopKRouter",
        "GraniteMoeTopKRouter",
        "MixtralTopKRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
    }
)
"""Classes of transformers that return `logits_TE`, `weight_TK`, `expert_TK`, and whose models have
this loss; tests/runtime/test_balance.py compares each with transformers' own."""

_SHARED = "_paceline_balancing"
"""Attribute of a router: the `_Routers` that it belongs to."""


@dataclass(frozen=True, slots=True)
class _Routers:
    """What the routers of a model have in common."""

    coefficient: float
    """Also divided by the tensor ranks, where each adds the same gradient to a sum over them."""

    number: int
    layout: Layout
    place: Coordinates
    groups: tuple[dist.ProcessGroup, ...]
    """Ranks with other tokens of the same samples. No other group is kept: a model of data ranks
    alone outlives its groups."""

    def own(self, whole_BS: Tensor) -> Tensor:
        """This rank's tokens of whole samples."""
        own_BS = local_tokens(whole_BS, self.layout, self.place.context)
        if not _routes_shares(self.layout):
            return own_BS
        return own_BS.chunk(self.layout.tensor, 1)[self.place.tensor]


def _routes_shares(layout: Layout) -> bool:
    """Whether each tensor rank routes tokens of its own."""
    return layout.tensor > 1 and layout.expert > 1 and layout.sequence_parallel


def balance_routers(model: nn.Module, layout: Layout, meshes: Meshes, coefficient: float) -> None:
    """Let the model's routers add the gradient of the balancing loss, inside `balanced`.

    Args:
        model: Split over expert and tensor ranks, not sharded or wrapped yet.
        layout: Without pipeline stages: the loss takes the routers of all layers together.
        coefficient: What the balancing loss is multiplied by; 0 changes nothing.

    Raises:
        PlanError: `L045`, the model has no routers that are known.
    """
    if not coefficient:
        return
    routers = [module for module in model.modules() if type(module).__name__ in ROUTERS]
    if not routers or layout.pipeline > 1:
        why = "its routers are not known" if not routers else "its layers are on several ranks"
        raise PlanError.of(
            code="L045",
            what=f"the balancing loss of {type(model).__name__} cannot be computed: {why}",
            where="train.router_loss",
            fix="set train.router_loss to 0",
        )
    repeated = layout.tensor if layout.expert == 1 else 1
    groups = [meshes.context] if layout.context > 1 else []
    if _routes_shares(layout):
        groups.append(meshes.tensor.get_group())
    shared = _Routers(coefficient / repeated, len(routers), layout, meshes.place, tuple(groups))
    for index, router in enumerate(routers):
        setattr(router, _SHARED, shared)
        router.register_forward_hook(partial(_add, index))


class _Balance:
    """The balancing losses of one micro-batch's samples."""

    def __init__(self, routers: _Routers, targets_BS: Tensor, scale: float) -> None:
        is_target_BS = targets_BS != IGNORED
        counted_BS = is_target_BS.flip(1).cumsum(1).flip(1) > 0
        self.counted_BS = routers.own(counted_BS)
        rows_B = (counted_BS.sum(1) * routers.number).clamp(min=1)
        weight_B = is_target_BS.sum(1).double() * (scale * routers.coefficient)
        self._factor_B = weight_B / rows_B.double() ** 2
        self._groups = routers.groups
        self._chosen: dict[int, Tensor] = {}
        self._total_BE: Tensor | None = None

    def choose(self, index: int, logits_TE: Tensor, expert_TK: Tensor) -> None:
        """Count how often a router chose each expert. Recomputed blocks count the same again."""
        num_samples = len(self.counted_BS)
        counted_TK = self.counted_BS.flatten()[:, None].expand_as(expert_TK).float()
        chosen_BX, counted_BX = (each.reshape(num_samples, -1) for each in (expert_TK, counted_TK))
        counts_BE = counted_TK.new_zeros(num_samples, logits_TE.shape[-1])
        self._chosen[index] = counts_BE.scatter_add_(1, chosen_BX, counted_BX)

    def gradient(self, logits_TE: Tensor) -> Tensor:
        """What the micro-batch's balancing losses add to the gradient of a router's logits."""
        if self._total_BE is None:
            self._total_BE = torch.stack(list(self._chosen.values())).sum(0)
            for group in self._groups:
                summed = FUNCTIONAL.all_reduce(self._total_BE, "sum", group.group_name)
                self._total_BE = FUNCTIONAL.wait_tensor(summed)
        num_samples, num_experts = self._total_BE.shape
        wide = torch.promote_types(logits_TE.dtype, torch.float32)
        slope_B1E = (self._total_BE * (num_experts * self._factor_B)[:, None])[:, None].to(wide)
        shares_BSE = logits_TE.to(wide).softmax(-1).view(num_samples, -1, num_experts)
        mean_BS1 = (shares_BSE * slope_B1E).sum(-1, keepdim=True)
        gradient_BSE: Tensor = shares_BSE * (slope_B1E - mean_BS1) * self.counted_BS[..., None]
        return gradient_BSE.flatten(0, 1).to(logits_TE.dtype)


class _Added(torch.autograd.Function):
    """A router's weights as they are; in the backward pass its logits get a gradient more."""

    @staticmethod
    def forward(ctx: Any, weight_TK: Tensor, logits_TE: Tensor, balance: _Balance) -> Tensor:
        ctx.save_for_backward(logits_TE)
        ctx.balance = balance
        return weight_TK.view_as(weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor, None]:
        (logits_TE,) = ctx.saved_tensors
        return grad_TK, ctx.balance.gradient(logits_TE), None


_current: list[_Balance | None] = [None]
"""A module's state and not a thread's, as in `context/documents.py`."""


def _add(index: int, router: nn.Module, _: object, output: tuple[Tensor, ...]) -> Any:
    balance = _current[-1]
    if balance is None or not torch.is_grad_enabled():
        return None
    logits_TE, weight_TK, expert_TK = output
    balance.choose(index, logits_TE.detach(), expert_TK)
    added: Tensor = _Added.apply(weight_TK, logits_TE, balance)  # type: ignore[no-untyped-call]
    return logits_TE, added, expert_TK


@contextmanager
def balanced(model: nn.Module, targets_BS: Tensor, scale: float) -> Iterator[None]:
    """While it lasts, backward passes add the gradient of the balancing loss, where one is asked
    for.

    Args:
        model: As `apply` returned it.
        targets_BS: Of the micro-batch, of whole samples.
        scale: What the sum of the micro-batch's losses is multiplied by.
    """
    found = (getattr(module, _SHARED, None) for module in model.modules())
    routers = next((each for each in found if each is not None), None)
    _current.append(None if routers is None else _Balance(routers, targets_BS, scale))
    try:
        yield
    finally:
        _current.pop()
