"""The state of training by name: parameters, saved buffers and optimizer state, layout-free names.

One flat dict serves checkpoints and digests alike. Names are the plain module's: what DDP,
`torch.compile` and activation checkpointing put in front is taken off, so a state has the same
names in every layout. A tied parameter is there once.

Leaves out: the optimizer's options (learning rate, weight decay ...), which follow from the job
and its schedule, and random generators, which are seeded afresh each step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MODEL, OPTIMIZER = "model/", "optimizer/"

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor (sharded ones as DTensor) and other saved value, the live ones and no copies.

    `model/blocks.0.ffn.up.weight`, `optimizer/blocks.0.ffn.up.weight/exp_avg`.
    """
    state = dict(_model_state(model))
    for name, parameter in named_parameters(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                state[optimizer_name(name, key)] = value
    return state


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under its layout-free name."""
    bare = _unwrapped(model)
    return {_plain(name): parameter for name, parameter in bare.named_parameters()}


def optimizer_name(parameter_name: str, key: str) -> str:
    """Name of one piece of a parameter's optimizer state."""
    return f"{OPTIMIZER}{parameter_name}/{key}"


def split_optimizer_name(name: str) -> tuple[str, str]:
    """Parameter and key of an optimizer state's name."""
    parameter_name, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
    return parameter_name, key


def set_other_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Hand values that are no tensors (a module's extra state) back to the model."""
    bare = _unwrapped(model)
    values = {
        raw: state[MODEL + _plain(raw)]
        for raw, value in bare.state_dict().items()
        if not isinstance(value, Tensor)
    }
    if values:
        bare.load_state_dict(values, strict=False)


def _model_state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, value in _unwrapped(model).state_dict(keep_vars=True).items():
        if id(value) in seen:  # a tied parameter, under its second name
            continue
        seen.add(id(value))
        yield MODEL + _plain(name), value


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
