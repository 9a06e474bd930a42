"""Gradients between the backward pass and the optimizer step: when to reduce, norm, clip.

The norm and the scaling are two calls because all ranks vote in between whether the step is taken.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from paceline.parallel.layout import Layout


def set_gradient_sync(model: nn.Module, layout: Layout, *, is_last: bool) -> None:
    """Say, before each micro-batch's forward pass, whether its gradients are reduced.

    Only the last micro-batch of a step reduces; the others add up locally. With
    `layout.reduce_every_micro_batch` a sharded model reduces each time, and keeps only its shard.

    Before the forward pass, because DDP prepares its reduction there.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_last
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or layout.reduce_every_micro_batch)


def gradient_norm(model: nn.Module) -> Tensor:
    """L2 norm over the gradients of all parameters: one float32 number, the same on every rank.

    Collective when the model is sharded: each rank sums its shards, then the ranks are summed.
    Not finite if any gradient is not.
    """
    gradients = _gradients(model.parameters())
    if not gradients:
        return torch.zeros(())
    norm = get_total_norm(gradients, norm_type=2.0)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their norm is at most `max_norm`.

    Args:
        model: The model that `norm` was taken of.
        norm: From `gradient_norm`.
        max_norm: Gradients with a smaller norm are left untouched.
    """
    if float(norm) <= max_norm:
        return
    factor = max_norm / float(norm)
    for gradient in _gradients(model.parameters()):
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Norm before clipping; `gradient_norm` and `scale_gradients` in one call, without the vote."""
    norm = gradient_norm(model)
    scale_gradients(model, norm, max_norm)
    return norm


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
