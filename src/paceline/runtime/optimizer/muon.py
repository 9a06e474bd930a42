"""Muon: each hidden matrix moves along its momentum made orthogonal; the rest is AdamW's.

The update's rows and columns are orthogonal, so it has no size of its own; scaled by
0.2 sqrt(max(rows, columns)) it is as large as AdamW's, and one learning rate serves both.

Sharded parameters keep shards of momentum and gather a matrix only while it is made orthogonal:
every rank of the group computes the same update from the same numbers and keeps its shard, so a
step costs each of them the products of all matrices. Matrices that are whole on a rank (experts
split by their leading dim) are not gathered.

Source: Jordan et al., 2024, https://kellerjordan.github.io/posts/muon; the scale: Liu et al.,
arXiv:2502.16982, section 2.2. torch 2.13's `Muon` takes two dims only, and multiplies a matrix that
is split by columns in another order, in bfloat16: the update is off by 2 %.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from paceline.job import TrainSpec
from paceline.runtime.optimizer.sharded import part_of, split_dims
from paceline.runtime.strategy.local import local_of

MOMENTUM, NUM_ITERATIONS = 0.95, 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic iteration, chosen for a steep slope at zero. Source of all three:
Jordan et al."""

LIKE_ADAM = 0.2
"""Root mean square of AdamW's updates in practice. Source: arXiv:2502.16982, section 2.2."""


def make(groups: list[dict[str, Any]], train: TrainSpec) -> torch.optim.Optimizer:
    return Muon(groups, lr=train.learning_rate, betas=train.betas, eps=train.eps)


class Muon(torch.optim.Optimizer):
    """Groups with `is_hidden` are matrices moved by Muon, the others by AdamW.

    State: `momentum_buffer`; or `exp_avg`, `exp_avg_sq` and `step`. Collective where hidden
    matrices are sharded by rows or columns.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "is_hidden": False}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            move = self._move_hidden if group["is_hidden"] else self._move_other
            for parameter in group["params"]:
                if parameter.grad is not None:
                    move(parameter, self.state[parameter], group)

    def _move_hidden(
        self, parameter: Tensor, state: dict[str, Any], options: dict[str, Any]
    ) -> None:
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, momentum = parameter.grad, state["momentum_buffer"]
        local_of(momentum).lerp_(local_of(gradient), 1 - MOMENTUM)
        ahead = local_of(gradient).lerp(local_of(momentum), MOMENTUM)  # Nesterov's
        update = _orthogonal_part(ahead, momentum)
        rows, columns = _matrix_shape(parameter)
        rate = float(options["lr"])
        weights = local_of(parameter)
        weights.mul_(1 - rate * float(options["weight_decay"]))
        weights.sub_(
            update.to(weights.dtype), alpha=rate * LIKE_ADAM * math.sqrt(max(rows, columns))
        )

    def _move_other(
        self, parameter: Tensor, state: dict[str, Any], options: dict[str, Any]
    ) -> None:
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        adamw_step(
            local_of(parameter),
            local_of(parameter.grad),
            local_of(state["exp_avg"]),
            local_of(state["exp_avg_sq"]),
            state["step"],
            options,
        )


def adamw_step(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    mean_square: Tensor,
    step: Tensor,
    options: dict[str, Any],
) -> None:
    """torch's own AdamW of one tensor or shard, in place; the step is counted."""
    beta1, beta2 = options["betas"]
    adamw(
        [weights],
        [gradient],
        [mean],
        [mean_square],
        [],
        [step],
        foreach=False,
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(options["lr"]),
        weight_decay=float(options["weight_decay"]),
        eps=options["eps"],
    )


def _orthogonal_part(ahead: Tensor, laid_out: Tensor) -> Tensor:
    """This rank's part of the orthogonal update."""
    last_dims = (laid_out.dim() - 2, laid_out.dim() - 1)
    is_cut = any(laid_out.dim() > 3 or dim in last_dims for _, dim in split_dims(laid_out))
    if not is_cut or not isinstance(laid_out, DTensor):
        return orthogonal(ahead)
    split = DTensor.from_local(
        ahead,
        laid_out.device_mesh,
        laid_out.placements,
        run_check=False,
        shape=laid_out.shape,
        stride=laid_out.stride(),
    )
    return local_of(part_of(orthogonal(split.full_tensor()), laid_out))


def orthogonal(matrices: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1, by a few products.

    The products are bfloat16 on an accelerator, as in the source, and the matrix's own type on a
    CPU. Three dims are a list of matrices (experts); four or more (convolutions) are one matrix,
    whose columns are all dims but the first.
    """
    rows, columns = _matrix_shape(matrices)
    flat = matrices.reshape(-1, rows, columns)
    work = flat if flat.device.type == "cpu" else flat.bfloat16()
    if rows > columns:
        work = work.mT
    work = work / work.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = work @ work.mT
        work = a * work + (b * gram + c * (gram @ gram)) @ work
    if rows > columns:
        work = work.mT
    result: Tensor = work.reshape(matrices.shape)
    return result


def _matrix_shape(tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() == 3:
        return tensor.shape[1], tensor.shape[2]
    return tensor.shape[0], math.prod(tensor.shape[1:])
