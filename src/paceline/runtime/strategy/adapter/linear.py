"""LoRA: a low-rank product beside a linear that stays as it is.

    output = W x + scale x B A dropout(x)

The two matrices are parameters of the linear itself, `lora_A` and `lora_B`, so that every module
keeps its name: what splits, shards and saves a model by names needs to know nothing new. All other
parameters are frozen: without a gradient, and left out of what is saved, sent and compared, as each
rank can make them again (`frozen_parameters`).

Letters in tensor names:
    B  samples, S tokens (any leading dims)     R  rank of the adapter
    I  inputs of the linear                     O  outputs of the linear

Source: Hu et al., arXiv:2106.09685, section 4.1.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.runtime._torch_private import parameters_of

LORA_A, LORA_B = "lora_A", "lora_B"

FROZEN = "paceline_frozen"
"""Attribute of a module: names of its own parameters that are frozen, whatever stands for them."""

FROZEN_DIGEST = "paceline_frozen_digest"
"""Attribute of a split model: what the numbers of its frozen parameters follow from. It is saved
and compared in their place."""


class Adapted:
    """A linear with an adapter, over the linear's own class."""

    lora_A: Tensor
    lora_B: Tensor
    adapter_scale: float
    adapter_dropout: float

    def forward(self, input_BSI: Tensor) -> Tensor:
        output_BSO = super().forward(input_BSI)  # type: ignore[misc]
        return add_product(self, input_BSI, output_BSO, self.lora_A, self.lora_B)


def add_product(
    module: Any, input_BSI: Tensor, output_BSO: Tensor, a_RI: Tensor, b_OR: Tensor
) -> Tensor:
    """What a linear gives, with its adapter's share: added while it is multiplied, which saves a
    tensor of that size. `baddbmm` and not `addmm`, whose result selective recompute would keep."""
    dropped_BSI = F.dropout(input_BSI, module.adapter_dropout, module.training)
    small_BSR = F.linear(dropped_BSI, a_RI)
    sum_1TO = torch.baddbmm(
        output_BSO.reshape(1, -1, output_BSO.shape[-1]),
        small_BSR.reshape(1, -1, small_BSR.shape[-1]),
        _turned(b_OR)[None],
        alpha=module.adapter_scale,
    )
    return sum_1TO.view(output_BSO.shape)


class _Turned(torch.autograd.Function):
    """A matrix turned round; its gradient lies in memory as the matrix does, not turned."""

    @staticmethod
    def forward(ctx: Any, matrix_OR: Tensor) -> Tensor:
        return matrix_OR.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].t().contiguous()


def _turned(matrix_OR: Tensor) -> Tensor:
    turned: Tensor = _Turned.apply(matrix_OR)  # type: ignore[no-untyped-call]
    return turned


def has_adapter(module: nn.Module) -> bool:
    """Whether a linear has an adapter, also one that was split."""
    return LORA_A in parameters_of(module)


def frozen_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that adapters are trained beside, as they are at the moment."""
    for module in model.modules():
        own = parameters_of(module)
        for name in vars(module).get(FROZEN, ()):
            if own.get(name) is not None:
                yield own[name]
