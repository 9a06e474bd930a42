"""NF4: matrices in four bits, their values and bytes as bitsandbytes has them.

Each 64 values of a row are a block: a byte for two codes, the first in its high half, and then the
block's scale, the largest value, in float32. All are one parameter of rows x (inputs / 64 x 36)
bytes, so that whole rows and whole blocks of columns split as they are. A scale is not quantised
again: 0.5625 bytes a value.

Letters in tensor names:
    O  outputs of a linear, I inputs    K  blocks of a row    P  bytes of a row, K x 36

Source: Dettmers et al., arXiv:2305.14314, section 3 and appendix E; bytes: bitsandbytes 0.50.2,
`quantize_4bit(blocksize=64, quant_type="nf4", compress_statistics=False)`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.profile.adapter import NF4_AT_ONCE, NF4_BLOCK, NF4_BLOCK_BYTES
from paceline.runtime._torch_private import FakeTensor, parameters_of

_CODE_BYTES = NF4_BLOCK // 2

_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, scaled to [-1, 1]. Source: arXiv:2305.14314, appendix E."""

_LEAST_SCALE = 1e-30
"""Divides a block of zeros, so that it stays zeros. Any number below all others."""


class Quantised:
    """A linear over the linear's own class, whose weight is in NF4 once `quantise_marked` was
    called. The weight stays as it is, and so has the bias no gradient either."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input_BSI: Tensor) -> Tensor:
        if not is_packed(self.weight):
            output_BSO: Tensor = super().forward(input_BSI)  # type: ignore[misc]
            return output_BSO
        return multiply_packed(input_BSI, self.weight, self.bias)


@torch.no_grad()
def quantise_marked(model: nn.Module) -> None:
    """Put the weights of all `Quantised` linears into NF4. On meta, the bytes alone are made: what
    fills them quantises as it stores (`store`)."""
    for module in model.modules():
        weight = parameters_of(module).get("weight")
        if isinstance(module, Quantised) and weight is not None and not is_packed(weight):
            packed_OP = _packed_like(weight) if weight.is_meta else quantise(weight.detach())
            parameters_of(module)["weight"] = nn.Parameter(packed_OP, requires_grad=False)


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is in NF4: no other parameter that a linear multiplies with has bytes."""
    return weight.dtype == torch.uint8


def quantise(weight_OI: Tensor) -> Tensor:
    """The bytes of a matrix, or of rows and whole blocks of one."""
    blocks = weight_OI.type(torch.float32).reshape(*weight_OI.shape[:-1], -1, NF4_BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True)
    shares = blocks / scales.clamp(min=_LEAST_SCALE)
    levels = _pairs(weight_OI)[:16, 1]
    edges = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(shares, edges, out_int32=True).to(torch.uint8)
    pairs = (codes[..., ::2] << 4) | codes[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], -1).flatten(-2)


def restore(packed_OP: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of bytes: level x scale in float32, rounded once."""
    rows, width = packed_OP.shape
    blocks_OKP = packed_OP.view(rows, width // NF4_BLOCK_BYTES, NF4_BLOCK_BYTES)
    num_inputs = blocks_OKP.shape[1] * NF4_BLOCK
    values_OI = torch.empty(rows, num_inputs, dtype=dtype, device=packed_OP.device)
    num_rows = max(1, NF4_AT_ONCE // max(1, num_inputs))
    pairs = _pairs(packed_OP)
    parts = zip(torch.split(blocks_OKP, num_rows), torch.split(values_OI, num_rows), strict=True)
    for part, out in parts:
        codes, scales = part[..., :_CODE_BYTES], part[..., _CODE_BYTES:]
        values = F.embedding(codes.int(), pairs).flatten(-2)
        out.copy_(values.mul_(scales.contiguous().view(torch.float32)).flatten(-2))
    return values_OI


def multiply_packed(input_BSI: Tensor, packed_OP: Tensor, bias: Tensor | None) -> Tensor:
    """What a linear with a frozen weight in NF4 gives, in the type of autocast or of its input."""
    kind = input_BSI.device.type
    if torch.is_autocast_enabled(kind):
        input_BSI = input_BSI.to(torch.get_autocast_dtype(kind))
    bias = None if bias is None else bias.to(input_BSI.dtype)
    output_BSO: Tensor = _Product.apply(input_BSI, packed_OP, bias)  # type: ignore[no-untyped-call]
    return output_BSO


class _Product(torch.autograd.Function):
    """A product with a matrix that is restored again in the backward pass instead of kept."""

    @staticmethod
    def forward(ctx: Any, input_BSI: Tensor, packed_OP: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(packed_OP)
        return F.linear(input_BSI, restore(packed_OP, input_BSI.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (packed_OP,) = ctx.saved_tensors
        (gradient_BSO,) = gradients
        return gradient_BSO @ restore(packed_OP, gradient_BSO.dtype), None, None


def value_box(begin: Sequence[int], local: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a part of a parameter begins, and its shape, counted in values."""
    if not is_packed(local) or local.dim() != 2:
        return tuple(begin), tuple(local.shape)
    (row, column), (rows, columns) = begin, local.shape
    return (row, _values(column)), (rows, _values(columns))


def byte_span(local: Tensor, span: Sequence[slice]) -> tuple[slice, ...]:
    """A span of values as one of what lies in memory."""
    if not is_packed(local) or local.dim() != 2:
        return tuple(span)
    rows, columns = span
    return rows, slice(_bytes(columns.start), _bytes(columns.stop))


def units_of(local: Tensor) -> tuple[int, ...]:
    """How many units a parameter has along each dim that may not be split: values, or blocks."""
    if not is_packed(local) or local.dim() != 2:
        return tuple(local.shape)
    return local.shape[0], local.shape[1] // NF4_BLOCK_BYTES


def store(room: Tensor, values: Tensor) -> None:
    """Copy values to their place, in its type: in NF4, they are quantised there."""
    room.copy_(quantise(values) if is_packed(room) and values.is_floating_point() else values)


def _values(num_bytes: int) -> int:
    blocks, rest = divmod(num_bytes, NF4_BLOCK_BYTES)
    assert rest == 0, "only whole blocks are split"
    return blocks * NF4_BLOCK


def _bytes(num_values: int) -> int:
    blocks, rest = divmod(num_values, NF4_BLOCK)
    assert rest == 0, "only whole blocks are split"
    return blocks * NF4_BLOCK_BYTES


def _packed_like(weight_OI: Tensor) -> Tensor:
    outputs, inputs = weight_OI.shape
    return torch.empty(outputs, _bytes(inputs), dtype=torch.uint8, device=weight_OI.device)


_pairs_on: dict[torch.device, Tensor] = {}


def _pairs(beside: Tensor) -> Tensor:
    """The two levels of every byte, on a tensor's device: copied there once."""
    if isinstance(beside, FakeTensor) or beside.is_meta:  # these end with the mode they are made in
        return _new_pairs(beside.device)
    if beside.device not in _pairs_on:
        _pairs_on[beside.device] = _new_pairs(beside.device)
    return _pairs_on[beside.device]


def _new_pairs(device: torch.device) -> Tensor:
    levels = torch.tensor(_LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], -1)
