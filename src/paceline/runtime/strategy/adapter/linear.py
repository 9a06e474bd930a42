"""LoRA and DoRA: a low-rank product beside a linear that stays as it is.

    LoRA    output = W x + scale x B A dropout(x)
    DoRA    output = m / |W + scale x B A| x (W + scale x B A) x

DoRA trains the length m of each output's row, its magnitude; the rows' norms are taken anew in each
forward pass, and have no gradient.

The matrices are parameters of the linear itself, `lora_A` and `lora_B`, so that every module
keeps its name: what splits, shards and saves a model by names needs to know nothing new. All other
parameters are frozen: without a gradient, and left out of what is saved, sent and compared, as each
rank can make them again (`frozen_parameters`).

Letters in tensor names:
    B  samples, S tokens (any leading dims)     R  rank of the adapter
    I  inputs of the linear                     O  outputs of the linear

Source: Hu et al., arXiv:2106.09685, section 4.1; Liu et al., arXiv:2402.09353, sections 4.1, 4.3.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.product import is_transposed, multiply

LORA_A, LORA_B, MAGNITUDE = ADAPTER = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Names of an adapter's parameters; a magnitude is DoRA's alone."""

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

    lora_magnitude_vector: Tensor | None
    weight: Tensor
    bias: Tensor | None

    def forward(self, input_BSI: Tensor) -> Tensor:
        if getattr(self, MAGNITUDE, None) is not None:
            adapter = (self.lora_A, self.lora_B, self.lora_magnitude_vector)
            return with_adapter(self, input_BSI, self.weight, self.bias, adapter, None)
        output_BSO = super().forward(input_BSI)  # type: ignore[misc]
        return _add_product(self, input_BSI, output_BSO, self.lora_A, self.lora_B)


def with_adapter(
    module: Any,
    input_BSI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: Sequence[Tensor | None],
    total: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """What a linear gives, with its adapter's share.

    Args:
        bias: Added once; with tensor ranks that share the inputs, by the caller.
        adapter: What is in `ADAPTER`, of the same part.
        total: Sums over the ranks, where each has a part of the inputs.
    """
    a_RI, b_OR, magnitude_O = adapter
    assert a_RI is not None and b_OR is not None  # noqa: PT018 - one law
    output_BSO = multiply(module, input_BSI, weight, bias if magnitude_O is None else None)
    output_BSO = _add_product(module, input_BSI, output_BSO, a_RI, b_OR)
    if magnitude_O is None:
        return output_BSO
    lengths_O = _row_norms(module, weight, a_RI, b_OR, total)
    output_BSO = output_BSO * (magnitude_O / lengths_O).to(output_BSO.dtype)
    return output_BSO if bias is None else output_BSO + bias.to(output_BSO.dtype)


@torch.no_grad()
def _row_norms(
    module: Any,
    weight: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    total: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """|W + s B A| of each output without the sum itself: |W|^2 + 2 s B (W A^T) + s^2 B (A A^T) B.

    peft adds B A to W in the type of the products, and takes the norms of that.
    """
    scale = module.adapter_scale
    squares_O = weight_norms(module, weight).square()
    with torch.autocast(weight.device.type, enabled=False):
        beside_OR = multiply(module, a_RI.to(weight.dtype), weight, None).T.to(squares_O.dtype)
        a_RI, b_OR = a_RI.to(squares_O.dtype), b_OR.to(squares_O.dtype)
        squares_O += ((2 * scale * beside_OR + scale**2 * (b_OR @ (a_RI @ a_RI.T))) * b_OR).sum(1)
    return (squares_O if total is None else total(squares_O)).sqrt()


def weight_norms(module: nn.Module, weight: Tensor) -> Tensor:
    """Length of each output's row of a linear's weight, in float32 or wider."""
    dim = 0 if is_transposed(module) else 1
    dtype = torch.promote_types(weight.dtype, torch.float32)
    norms_O: Tensor = torch.linalg.vector_norm(weight, dim=dim, dtype=dtype)
    return norms_O


def _add_product(
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
