"""Adafactor: AdamW's second moment as one row and one column of each matrix, and no first moment.

The same numbers in every layout: sums along a row or a column are taken over all of its shards.

Source: Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5; updates are scaled by the learning
rate and the parameter's size as in `torch.optim.Adafactor`, which refuses DTensors (torch 2.13).
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.job import TrainSpec
from paceline.runtime.optimizer.sharded import Sums, like, part_of, split_dims
from paceline.runtime.strategy.local import local_of

BETA2_DECAY, CLIP = -0.8, 1.0
"""Exponent of the second moment's decay, and the largest root mean square of an update. Source: the
paper, sections 7.2 and 6."""

LEAST_SCALE = 1e-3
"""Least size that a parameter is taken to have. Source: the paper, section 8 (epsilon 2)."""


def make(groups: list[dict[str, Any]], train: TrainSpec) -> torch.optim.Optimizer:
    return Adafactor(groups, lr=train.learning_rate)


class Adafactor(torch.optim.Optimizer):
    """State of a matrix of R x C: `row_var`, R x 1, and `col_var`, 1 x C; of others `variance`.

    A tensor of more dims is as many matrices as its leading dims say (experts). Collective where
    parameters are sharded: three all-reduces a step for each group of ranks that shares some.
    """

    def __init__(
        self, parameters: Iterable[Any], *, lr: float = 1e-2, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        updates = [
            _Update(parameter, self.state[parameter], group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        sums = Sums()
        for part in (_Update.add_squares, _Update.add_mean, _Update.add_length):
            for update in updates:
                part(update, sums)
            sums.run()
        for update in updates:
            update.apply()


class _Update:
    """One parameter's step, in the parts between which sums over shards are taken."""

    def __init__(self, parameter: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        self.parameter = parameter
        self.state = state
        self.options = options
        self.weights = local_of(parameter.detach())
        assert parameter.grad is not None
        self.gradient = local_of(parameter.grad)
        self.groups = split_dims(parameter)
        self.is_matrix = parameter.dim() >= 2
        if "step" not in state:
            self._begin()
        state["step"] += 1

    def _begin(self) -> None:
        shape, part = list(self.parameter.shape), self.weights
        self.state["step"] = torch.tensor(0.0)
        if not self.is_matrix:
            self.state["variance"] = torch.zeros_like(self.parameter)
            return
        rows = part.new_zeros([*part.shape[:-1], 1])
        columns = part.new_zeros([*part.shape[:-2], 1, part.shape[-1]])
        self.state["row_var"] = like(self.parameter, rows, [*shape[:-1], 1])
        self.state["col_var"] = like(self.parameter, columns, [*shape[:-2], 1, shape[-1]])

    def add_squares(self, sums: Sums) -> None:
        """Mean squares of the gradient along rows and columns, and the sum of the weights'."""
        everyone = [group for group, _ in self.groups]
        self.size = sums.add(self.weights.square().sum(), everyone)
        squares = self.gradient.square()
        if not self.is_matrix:
            self.squares = squares
            return
        *_, num_rows, num_columns = self.parameter.shape
        self.rows = sums.add(squares.sum(-1, keepdim=True) / num_columns, self._groups_along(-1))
        self.columns = sums.add(squares.sum(-2, keepdim=True) / num_rows, self._groups_along(-2))

    def add_mean(self, sums: Sums) -> None:
        """The averages over steps, and the mean of the rows', by which row x column is divided."""
        share = float(self.state["step"]) ** BETA2_DECAY
        if not self.is_matrix:
            self._part("variance").lerp_(self.squares, share)
            return
        rows = self._part("row_var").lerp_(self.rows, share)
        self._part("col_var").lerp_(self.columns, share)
        mean = rows.sum(-2, keepdim=True) / self.parameter.shape[-2]
        self.mean = sums.add(mean, self._groups_along(-2))

    def add_length(self, sums: Sums) -> None:
        """The update before it is clipped, and the sum of its squares."""
        least = torch.finfo(self.weights.dtype).eps
        if self.is_matrix:
            second = self._part("row_var") @ self._part("col_var") / self.mean.clamp(min=least)
        else:
            second = self._part("variance")
        self.update = self.gradient * second.clamp(min=least**2).rsqrt()
        self.length = sums.add(self.update.square().sum(), [group for group, _ in self.groups])

    def apply(self) -> None:
        """Decay the weights and add the update, both scaled by the learning rate."""
        rate, num = float(self.options["lr"]), self.parameter.numel()
        relative = min(rate, 1 / math.sqrt(float(self.state["step"])))
        scale = (self.size / num).sqrt().clamp(min=LEAST_SCALE) * relative
        excess = ((self.length / num).sqrt() / CLIP).clamp(min=1.0)
        self.weights.mul_(1 - rate * float(self.options["weight_decay"]))
        self.weights.sub_(self.update * (scale / excess))

    def _groups_along(self, dim: int) -> list[dist.ProcessGroup]:
        """Ranks that have other parts of the same rows (-1) or columns (-2)."""
        return [group for group, split in self.groups if split == self.parameter.dim() + dim]

    def _part(self, key: str) -> Tensor:
        """This rank's part of a state; one that was loaded whole is laid out first."""
        self.state[key] = part_of(self.state[key], self.parameter)
        return local_of(self.state[key])
