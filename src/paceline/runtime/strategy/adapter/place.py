"""Put adapters beside the linears of a model's blocks, and freeze all else.

Leaves out: what an adapter computes (`linear.py`).
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import PlanError
from paceline.profile.adapter import Adaptation, linear_name
from paceline.runtime._torch_private import FakeTensor, parameters_of
from paceline.runtime.strategy.adapter.linear import (
    FROZEN,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    Adapted,
    weight_norms,
)
from paceline.runtime.strategy.adapter.nf4 import Quantised
from paceline.runtime.strategy.blocks import numbered_blocks
from paceline.runtime.strategy.product import is_transposed
from paceline.runtime.strategy.tensor.modules import class_of
from paceline.runtime.strategy.tensor.rules import LINEARS
from paceline.runtime.strategy.ways.find import ways_of

_STREAM = 0x10BA
"""Sets the adapters' random numbers apart from the model's. Any number."""


@torch.no_grad()
def add_adapters(model: nn.Module, asked: Adaptation) -> nn.Module:
    """The model with adapters, all else frozen and in its type. Linears whose weights are to be in
    NF4 keep them in float32 until `quantise_marked` is called.

    A is drawn as peft does (Kaiming's uniform distribution with a = sqrt 5), B is zero, so that the
    model computes at first what it did before. Their numbers follow from the seed alone.

    Args:
        model: Whole, on one device or on meta, before it is split.

    Raises:
        PlanError: `R013`, the linears are not those that were planned.
    """
    linears = [
        (name, module)
        for _, block in numbered_blocks(model, ways_of(model))
        for name, module in block.named_modules()
        if type(module).__name__ in LINEARS
    ]
    found = [module for name, module in linears if linear_name(name) in asked.targets]
    num = sum(_num_parameters(module, asked) for module in found)
    if num != asked.num_parameters:
        raise _others(model, "targets", found, f"adapters of {asked.num_parameters}", num)
    quantised = [module for _, module in linears if asked.num_quantised]
    num = sum(module.get_parameter("weight").numel() for module in quantised)
    if num != asked.num_quantised or not all(isinstance(each, nn.Linear) for each in quantised):
        raise _others(model, "kind", quantised, f"NF4 of {asked.num_quantised}", num)
    for linear in quantised:
        original: type = type(linear)
        linear.__class__ = class_of(original, Quantised)
    _freeze(model, getattr(torch, asked.frozen_type))
    drawn = np.random.SeedSequence([asked.seed, _STREAM]).generate_state(1, np.uint32)
    torch.manual_seed(int(drawn[0]))
    for linear in found:
        _adapt(linear, asked)
    return model


def _features(linear: nn.Module) -> tuple[int, int]:
    shape: Sequence[int] = linear.get_parameter("weight").shape
    outputs, inputs = shape[::-1] if is_transposed(linear) else shape
    return outputs, inputs


def _num_parameters(linear: nn.Module, asked: Adaptation) -> int:
    outputs, inputs = _features(linear)
    return asked.rank * (outputs + inputs) + asked.has_magnitudes * outputs


def _adapt(linear: Any, asked: Adaptation) -> None:
    outputs, inputs = _features(linear)
    weight = linear.get_parameter("weight")
    device = weight.device
    a_RI = torch.empty(asked.rank, inputs, device=device)
    nn.init.kaiming_uniform_(a_RI, a=sqrt(5))
    linear.register_parameter(LORA_A, nn.Parameter(a_RI))
    b_OR = torch.zeros(outputs, asked.rank, device=device)
    linear.register_parameter(LORA_B, nn.Parameter(b_OR))
    if asked.has_magnitudes:  # of drawn or read numbers, `Filler` sets them
        is_here = not (weight.is_meta or isinstance(weight, FakeTensor))
        lengths_O = weight_norms(linear, weight) if is_here else torch.ones(outputs, device=device)
        linear.register_parameter(MAGNITUDE, nn.Parameter(lengths_O.float()))
    linear.adapter_scale, linear.adapter_dropout = asked.scale, asked.dropout
    original: type = type(linear)
    linear.__class__ = class_of(original, Adapted)


def _others(
    model: nn.Module, field: str, found: list[nn.Module], planned: str, num: int
) -> PlanError:
    return PlanError.of(
        code="R013",
        what=f"planned were {planned} parameters, and the {len(found)} linears found in "
        f"{type(model).__name__} have {num}",
        where=f"train.adapter.{field}",
        fix="set train.adapter.targets to attention and kind to lora, or train with a program of "
        "your own",
    )


def _freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Every parameter without a gradient, and in another type: norms too, whose kernels take one
    type alone, so that the residual stream has it as well, as with FSDP2. What is quantised later
    is so from its values as they are."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = {name: value for name, value in parameters_of(module).items() if value is not None}
        for name, parameter in own.items():
            if id(parameter) not in done:
                is_quantised = isinstance(module, Quantised) and name == "weight"
                value = parameter.detach() if is_quantised else parameter.detach().to(dtype)
                done[id(parameter)] = nn.Parameter(value, False)
                done[id(done[id(parameter)])] = done[id(parameter)]
            parameters_of(module)[name] = done[id(parameter)]
        if own:
            setattr(module, FROZEN, frozenset(own))
