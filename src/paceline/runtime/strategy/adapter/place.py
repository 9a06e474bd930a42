"""Put adapters beside the linears of a model's blocks, and freeze all else.

Leaves out: what an adapter computes (`linear.py`).
"""

from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import PlanError
from paceline.profile.adapter import Adaptation, linear_name
from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.adapter.linear import FROZEN, LORA_A, LORA_B, Adapted
from paceline.runtime.strategy.blocks import numbered_blocks
from paceline.runtime.strategy.tensor.rules import LINEARS
from paceline.runtime.strategy.ways.known import ways_of

_STREAM = 0x10BA
"""Sets the adapters' random numbers apart from the model's. Any number."""


@torch.no_grad()
def add_adapters(model: nn.Module, asked: Adaptation) -> nn.Module:
    """The same model with adapters, all else frozen and in its type.

    A is drawn as peft does (Kaiming's uniform distribution with a = sqrt 5), B is zero, so that the
    model computes at first what it did before. Their numbers follow from the seed alone.

    Args:
        model: Whole, on one device or on meta, before it is split.
        asked: Which linears, and how.

    Raises:
        PlanError: `R013`, the linears are not those that were planned.
    """
    found = [
        module
        for _, block in numbered_blocks(model, ways_of(model))
        for name, module in block.named_modules()
        if type(module).__name__ in LINEARS and linear_name(name) in asked.targets
    ]
    num = sum(asked.rank * sum(module.get_parameter("weight").shape) for module in found)
    if num != asked.num_parameters:
        raise PlanError.of(
            code="R013",
            what=f"the adapters planned for have {asked.num_parameters} parameters, and those of "
            f"the {len(found)} linears found in {type(model).__name__} would have {num}",
            where="train.adapter.targets",
            fix="set train.adapter.targets to attention, or train with a program of your own",
        )
    _freeze(model, getattr(torch, asked.frozen_type))
    drawn = np.random.SeedSequence([asked.seed, _STREAM]).generate_state(1, np.uint32)
    torch.manual_seed(int(drawn[0]))
    for linear in found:
        _adapt(linear, asked)
    return model


def _adapt(linear: Any, asked: Adaptation) -> None:
    outputs, inputs = linear.get_parameter("weight").shape
    if not isinstance(linear, nn.Linear):  # GPT-2's Conv1D has input x output features
        outputs, inputs = inputs, outputs
    device = linear.get_parameter("weight").device
    a_RI = torch.empty(asked.rank, inputs, device=device)
    nn.init.kaiming_uniform_(a_RI, a=sqrt(5))
    linear.register_parameter(LORA_A, nn.Parameter(a_RI))
    b_OR = torch.zeros(outputs, asked.rank, device=device)
    linear.register_parameter(LORA_B, nn.Parameter(b_OR))
    linear.adapter_scale, linear.adapter_dropout = asked.scale, asked.dropout
    original: type = type(linear)
    linear.__class__ = _class_of(original)


@cache
def _class_of(original: type) -> type:
    """One class for all linears of a kind, under the same name."""
    body = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (Adapted, original), body)


def _freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Every parameter without a gradient, and in another type: norms too, whose kernels take one
    type alone, so that the residual stream has it as well, as with FSDP2."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = {name: value for name, value in parameters_of(module).items() if value is not None}
        for name, parameter in own.items():
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), False)
                done[id(done[id(parameter)])] = done[id(parameter)]
            parameters_of(module)[name] = done[id(parameter)]
        if own:
            setattr(module, FROZEN, frozenset(own))
