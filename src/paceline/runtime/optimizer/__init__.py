"""The optimizer of a job. Each optimizer has a module of its own here, named for it, whose
`make(groups, train)` returns it.

Leaves out: clipping, which is in `strategy/`; stepping, which is the session's; the learning rate
of a step, which is in `job/train_rules.py`.
"""

from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.job import TrainSpec
from paceline.runtime.strategy.blocks import HasBlocks, numbered_blocks
from paceline.runtime.strategy.local import unwrapped


def make_optimizer(
    model: nn.Module, train: TrainSpec, ways: HasBlocks | None = None
) -> torch.optim.Optimizer:
    """The job's optimizer over the parameters of a model, after `strategy.apply`.

    Only parameters of two or more dims decay: not norms, biases or other vectors. Splitting keeps a
    parameter's number of dims, so this is the same in every layout. Parameters keep the order of
    `named_parameters`, and a tied one is there once. Each group holds parameters that are shared by
    the same ranks, because torch cannot update DTensors of different meshes, or DTensors and plain
    tensors, in one operation.

    Muon's hidden matrices are those of the blocks; AdamW moves embeddings, the head and vectors.

    Args:
        ways: Where the blocks are, for Muon; found when left out.
    """
    hidden = _hidden_matrices(model, ways) if train.optimizer == "muon" else set()
    groups: dict[tuple[bool, bool, object], dict[str, Any]] = {}
    for parameter in dict.fromkeys(model.parameters()):
        if not parameter.requires_grad:
            continue
        decays, is_hidden = parameter.dim() >= 2, parameter in hidden
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        decay = train.weight_decay if decays else 0.0
        group = groups.setdefault((not decays, is_hidden, mesh), {"params": []})
        group["params"].append(parameter)
        group["weight_decay"] = decay
        if train.optimizer == "muon":
            group["is_hidden"] = is_hidden
    in_order = [groups[key] for key in sorted(groups, key=lambda key: key[0])]
    module = import_module(f"{__name__}.{train.optimizer.replace('-', '_')}")
    return cast(torch.optim.Optimizer, module.make(in_order, train))


def _hidden_matrices(model: nn.Module, ways: HasBlocks | None) -> set[nn.Parameter]:
    inner = unwrapped(model)
    tables = {module.weight for module in inner.modules() if isinstance(module, nn.Embedding)}
    found = {
        parameter
        for _, block in numbered_blocks(inner, ways)
        for parameter in block.parameters()
        if parameter.dim() >= 2
    }
    return found - tables
