"""AdamW whose two moments are kept in a byte each.

A moment is cut into blocks of 256 numbers along its last dim. Each block has its largest magnitude
in float32 and every number as one of 256 codes, which are dense near zero (dynamic tree). Blocks
never cross rows, so shards of rows hold whole blocks: the numbers are the same in every layout, and
also under tensor parallelism that splits columns when its parts are multiples of 256.

Tensors of less than 4,096 numbers, and vectors, keep float32 moments.

Source: Dettmers et al., arXiv:2110.02861, sections 2.1 to 2.3.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.job import TrainSpec
from paceline.runtime._torch_private import FakeTensor
from paceline.runtime.optimizer.muon import adamw_step
from paceline.runtime.optimizer.sharded import like, part_of
from paceline.runtime.strategy.local import local_of

BLOCK = 256
"""Numbers that share a scale. Source: bitsandbytes 0.44; the paper has 2,048."""

LEAST_SIZE = 4096
"""Numbers of a tensor worth quantising. Source: bitsandbytes, `min_8bit_size`."""


def make(groups: list[dict[str, Any]], train: TrainSpec) -> torch.optim.Optimizer:
    return AdamW8bit(groups, lr=train.learning_rate, betas=train.betas, eps=train.eps)


class AdamW8bit(torch.optim.Optimizer):
    """State: `step`; `exp_avg` and `exp_avg_sq` as codes (uint8, the parameter's shape), and their
    scales `exp_avg_scale` and `exp_avg_sq_scale`, one for each block."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _move(parameter, self.state[parameter], group)

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """What a parameter begins with: a checkpoint whose blocks were cut otherwise is refused."""
        state: dict[str, Any] = {}
        _begin(parameter, state)
        return state


def _move(parameter: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
    if "step" not in state:
        _begin(parameter, state)
    assert parameter.grad is not None
    weights, gradient = local_of(parameter), local_of(parameter.grad)
    keys = ("exp_avg", "exp_avg_sq")
    if f"{keys[0]}_scale" not in state:
        mean, mean_square = (local_of(state[key]) for key in keys)
        adamw_step(weights, gradient, mean, mean_square, state["step"], options)
        return
    scales = [_scale(parameter, state, key) for key in keys]
    signs = (True, False)
    mean, mean_square = (
        dequantise(local_of(state[key]), scale, signed=signed).to(weights.dtype)
        for key, scale, signed in zip(keys, scales, signs, strict=True)
    )
    adamw_step(weights, gradient, mean, mean_square, state["step"], options)
    for key, moment, scale, signed in zip(keys, (mean, mean_square), scales, signs, strict=True):
        codes, largest = quantise(moment, signed=signed)
        local_of(state[key]).copy_(codes)
        scale.copy_(largest)


def _begin(parameter: Tensor, state: dict[str, Any]) -> None:
    state["step"] = torch.tensor(0.0)
    is_small = parameter.dim() < 2 or parameter.numel() < LEAST_SIZE
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        if is_small:
            state[key] = torch.zeros_like(parameter)
            continue
        codes, scale = quantise(torch.zeros_like(local_of(parameter)), signed=signed)
        state[key] = torch.zeros_like(parameter, dtype=torch.uint8)
        local_of(state[key]).copy_(codes)
        shape = [*parameter.shape[:-1], _num_blocks(parameter)]
        state[f"{key}_scale"] = like(parameter, scale, shape)


def _num_blocks(parameter: Tensor) -> int:
    """Blocks of a whole row: each rank's part begins a block of its own."""
    num_local = local_of(parameter).shape[-1]
    parts = -(-parameter.shape[-1] // num_local) if num_local else 1
    return parts * -(-num_local // BLOCK)


def _scale(parameter: Tensor, state: dict[str, Any], key: str) -> Tensor:
    """A state's scales; one that was loaded whole is laid out first."""
    name = f"{key}_scale"
    state[name] = part_of(state[name], parameter)
    return local_of(state[name])


def quantise(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes of the same shape, and each block's largest magnitude in float32."""
    blocks = _in_blocks(values.float())
    largest = blocks.abs().amax(-1)
    shares = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(shares, _tables(signed, values)[1], out_int32=True)
    flat = codes.to(torch.uint8).flatten(-2)
    return flat[..., : values.shape[-1]].contiguous(), largest


def dequantise(codes: Tensor, largest: Tensor, *, signed: bool) -> Tensor:
    """The float32 numbers that codes stand for."""
    shares = _in_blocks(_tables(signed, codes)[0][codes.int()])
    values = shares * largest.unsqueeze(-1)
    return values.flatten(-2)[..., : codes.shape[-1]]


def _in_blocks(values: Tensor) -> Tensor:
    missing = -values.shape[-1] % BLOCK
    full = torch.nn.functional.pad(values, (0, missing))
    # Counted, as -1 is ambiguous in a shard without rows.
    return full.view(*full.shape[:-1], full.shape[-1] // BLOCK, BLOCK)


def _shares(signed: bool) -> list[float]:
    """256 numbers from -1 (or 0) to 1 in order: seven decades, the larger the finer.

    Source: arXiv:2110.02861, section 1.3, dynamic tree quantisation; as bitsandbytes'
    `create_dynamic_map`.
    """
    found = [0.0, 1.0]
    bits = 7
    for decade in range(bits):
        num = 2 ** (decade if signed else decade + 1)
        edges = np.linspace(0.1, 1, num + 1)  # of numpy: proving gives torch's no values
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - bits + 1)).tolist()
        found += means + ([-mean for mean in means] if signed else [])
    return sorted(found)


def _tables(signed: bool, beside: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(beside, FakeTensor):  # these end with the mode that they are made in
        return _tables_on.__wrapped__(signed, beside.device)
    return _tables_on(signed, beside.device)


@cache
def _tables_on(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    shares = torch.tensor(_shares(signed), dtype=torch.float32, device=device)
    return shares, (shares[:-1] + shares[1:]) / 2
