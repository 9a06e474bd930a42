"""What a linear computes, whichever way its weight is kept."""

from typing import Any

from torch import Tensor, addmm, matmul, nn
from torch.nn import functional as F

from paceline.runtime.strategy.adapter.nf4 import is_packed, multiply_packed


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear keeps its weight as input x output features (GPT-2's Conv1D)."""
    return not isinstance(module, nn.Linear)


def multiply(module: Any, input_BSI: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What a linear computes, with other parameters than its own."""
    if is_packed(weight):
        return multiply_packed(input_BSI, weight, bias)
    if not is_transposed(module):
        return F.linear(input_BSI, weight, bias)
    if bias is None:
        return matmul(input_BSI, weight)
    output_TO = addmm(bias, input_BSI.reshape(-1, weight.shape[0]), weight)
    return output_TO.view(*input_BSI.shape[:-1], weight.shape[1])
