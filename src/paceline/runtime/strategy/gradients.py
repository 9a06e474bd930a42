"""Gradients between the backward pass and the optimizer step: their norm, scaling, clipping.

The norm and the scaling are two calls because all ranks vote in between whether the step is taken.
"""

from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime._torch_private import norm_of_each, scale_each
from paceline.runtime.strategy.local import local_of
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.pipeline.pipeline import Pipeline


def gradient_norm(model: nn.Module, meshes: Meshes) -> Tensor:
    """L2 norm over the gradients of all parameters, each counted once however it is split: one
    float64 number, the same on every rank.

    Every rank adds up the squares of what it holds, divided by the number of ranks that hold the
    same, and the sums are added over all ranks. Collective, unless every rank holds everything.
    Not finite if any gradient is not.
    """
    elsewhere = set(model.counted_elsewhere()) if isinstance(model, Pipeline) else set()
    counted = (parameter for parameter in model.parameters() if parameter not in elsewhere)
    held: dict[int, list[Tensor]] = {}
    for gradient in _gradients(counted):
        held.setdefault(_num_copies(gradient, meshes), []).append(local_of(gradient))
    total = torch.zeros((), dtype=torch.float64, device=meshes.device_type)
    if not _is_split(model, meshes):
        for gradients in held.values():
            total += _sum_of_squares(gradients)
        return total.sqrt()
    for copies, gradients in held.items():
        total += _sum_of_squares(gradients) / copies
    dist.all_reduce(total)
    return total.sqrt()


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply all gradients in place."""
    if factor != 1.0:
        held = [local_of(gradient) for gradient in _gradients(model.parameters())]
        if held:
            scale_each(held, factor)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of this norm are multiplied by, so that it is at most `max_norm`.

    >>> clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, None)
    (0.25, 1.0, 1.0)
    """
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def _is_split(model: nn.Module, meshes: Meshes) -> bool:
    layout = meshes.layout
    return layout.pipeline > 1 or any(isinstance(each, DTensor) for each in model.parameters())


def _num_copies(gradient: Tensor, meshes: Meshes) -> int:
    """Ranks that hold the same part of a gradient."""
    stage_ranks = meshes.layout.num_ranks // meshes.layout.pipeline
    if not isinstance(gradient, DTensor):
        return stage_ranks
    mesh, placements = gradient.device_mesh, gradient.placements
    assert not any(each.is_partial() for each in placements), "a gradient is not reduced yet"
    # Not `is_shard`, which is False for the strided shards of FSDP2 over tensor parallelism.
    return stage_ranks // prod(
        mesh.size(axis) for axis, each in enumerate(placements) if not each.is_replicate()
    )


def _sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    norms = norm_of_each([each for each in gradients if each.numel()] or [torch.zeros(1)])
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
