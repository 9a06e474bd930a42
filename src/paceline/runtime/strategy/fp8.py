"""Linears that multiply in float8, with a scale for each row.

Inputs and weights are cast as they are used: parameters, gradients and activations keep their
types, so FSDP2, recompute and checkpoints see nothing of it. Every row of an input and every row
(output feature) of a weight is scaled to float8's range (e4m3: 3 bits of mantissa) by its own
largest value, and so are gradients going backward. The weight's gradient, which sums over tokens
and not along rows, is multiplied in the type of its inputs: torchao's `rowwise_with_gw_hp`.

Leaves out: tensor parallelism, and dims that are not multiples of 16, which stay as they are: the
hardware cannot multiply them.

Source: Micikevicius et al., arXiv:2209.05433; scales by row: `torch._scaled_mm` of torch 2.13.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from paceline.errors import PlanError, Problem
from paceline.runtime._torch_private import SCALED_MM
from paceline.runtime.strategy.blocks import HasBlocks, numbered_blocks

ALIGNMENT = 16
"""Both dims of a float8 matrix are multiples of it. Source: cuBLASLt, FP8 matrix multiplication."""

_FLOAT8 = torch.float8_e4m3fn


def use_float8(model: nn.Module, ways: HasBlocks | None = None) -> str | None:
    """Make the linears of the blocks multiply in float8. In place, before `shard`.

    Embedding, head and norms stay as they are, as in the source, section 4.

    Returns:
        What is to be said of linears that cannot, None where all can.

    Raises:
        PlanError: `R034`, none can.
    """
    linears = [
        (f"blocks {index}, {name or 'itself'}", module)
        for index, block in numbered_blocks(model, ways)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
    ]
    fitting = [each for _, each in linears if type(each) is nn.Linear and _is_aligned(each)]
    left = [each for each in linears if not any(each[1] is other for other in fitting)]
    if not fitting:
        raise PlanError(_none_fits(len(linears)))
    for linear in fitting:
        module: nn.Module = linear
        module.forward = _forward_of(linear)
    if not left:
        return None
    name, first = left[0]
    return (
        f"train.precision fp8: {len(left)} of {len(linears)} linears stay bf16, whose widths are "
        f"no multiples of {ALIGNMENT} or whose class is its own; the first is {name}: "
        f"{first.in_features} to {first.out_features}"
    )


def _none_fits(num_linears: int) -> Problem:
    return Problem(
        code="R034",
        what=f"none of the {num_linears} linears in the blocks can multiply in float8: both widths "
        f"must be multiples of {ALIGNMENT}",
        where="train.precision",
        fix=f"set train.precision to bf16, or make the widths multiples of {ALIGNMENT}",
    )


def _is_aligned(linear: nn.Linear) -> bool:
    return linear.in_features % ALIGNMENT == 0 and linear.out_features % ALIGNMENT == 0


def _forward_of(linear: nn.Linear) -> Any:
    def forward(inputs: Tensor) -> Tensor:
        compute = torch.get_autocast_dtype(inputs.device.type) if _is_autocast(inputs) else None
        flat = inputs.flatten(0, -2).to(compute or inputs.dtype)
        outputs: Tensor = _Float8Product.apply(flat, linear.weight.to(flat.dtype))  # type: ignore[no-untyped-call]
        if linear.bias is not None:
            outputs = outputs + linear.bias.to(outputs.dtype)
        return outputs.view(*inputs.shape[:-1], linear.out_features)

    return forward


def _is_autocast(inputs: Tensor) -> bool:
    return torch.is_autocast_enabled(inputs.device.type)


class _Float8Product(torch.autograd.Function):
    """inputs_TI @ weight_OI.T"""

    @staticmethod
    def forward(ctx: FunctionCtx, inputs_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(inputs_TI, weight_OI)
        return product(inputs_TI, weight_OI)

    @staticmethod
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Tensor, Tensor]:
        inputs_TI, weight_OI = ctx.saved_tensors
        gradient_TI = product(gradient_TO, weight_OI.T)
        return gradient_TI, gradient_TO.T @ inputs_TI


def product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """left @ right.T, in the type of `left`."""
    left, left_scale_M1 = to_float8(left_MK)
    right, right_scale_N1 = to_float8(right_NK)
    scaled: Tensor = SCALED_MM(
        left,
        right.T,
        scale_a=left_scale_M1,
        scale_b=right_scale_N1.T,
        out_dtype=torch.bfloat16,
    )
    return scaled.to(left_MK.dtype)


def to_float8(rows_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in float8, and the float32 factor that gives it back; 1 for a row of zeros."""
    largest_M1 = rows_MK.detach().abs().amax(-1, keepdim=True).float()
    scale_M1 = torch.where(largest_M1 > 0, largest_M1 / torch.finfo(_FLOAT8).max, 1.0)
    return (rows_MK.float() / scale_M1).to(_FLOAT8).contiguous(), scale_M1
