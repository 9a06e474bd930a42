"""Routed experts shared among ranks: every rank keeps some, and tokens travel to theirs and back.

Leaves out: the router and shared experts, which stay whole on every rank; reducing gradients under
FSDP2 (`shard.py` wraps `expert_modules`). The travelling itself is in `all_to_all.py`.

**A module of routed experts** has `num_experts`, parameters that all have one row for each expert
in dim 0, no buffers, and the call that `Experts` describes. transformers 5 has written its own so;
of those, the classes in `PROVEN` are tested to give what one device gives, and others are refused.
A module of your own is named in `Ways.experts`.

**Gradients are sums.** A rank's experts see the tokens of all ranks of `meshes.expert`, so their
gradients already hold what those ranks' losses say, and only ranks with the same experts
(`meshes.expert_fsdp`) are left to sum over:

- FSDP2: `fully_shard(module, mesh=meshes.expert_fsdp, shard_placement_fn=even_placement(mesh))`
  for each of `expert_modules(model)`, before the block it is in, with gradient divide factor 1 and
  without casting inputs (`cast_forward_inputs=False`: the weights of the router stay float32).
- Otherwise `replica.GradientSums`, told so for `expert_parameters(model)`.

**Tensor ranks** each hold the same experts, whole: `layout.tensor` does not divide them. With
sequence parallelism each tensor rank sends its own tokens, and the gradients are summed over the
tensor ranks in the backward pass; without it each computes the same. `split_tensors` comes after,
with `tensor_ways`, which leave the experts to this module.

**The balancing loss** is added where routers hand on their weights: `balance.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.errors import PlanError, Problem
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_expert_ranks, check_experts
from paceline.profile.ways import Ways
from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.expert.all_to_all import run_spread_experts
from paceline.runtime.strategy.local import local_of
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.tensor.regions import copy_to
from paceline.runtime.strategy.ways.ways import block_modules

PROVEN = frozenset(
    {
        "DeepseekV2Experts",
        "DeepseekV3Experts",
        "GptOssExperts",
        "GraniteMoeExperts",
        "MixtralExperts",
        "OlmoeExperts",
        "Qwen2MoeExperts",
        "Qwen3MoeExperts",
    }
)
"""Classes of transformers that tests/runtime/test_expert.py compares with one device."""

_IS_SPLIT = "paceline_splits_experts"
"""Attribute of a module whose experts have been shared out."""


class Experts(Protocol):
    """What a module of routed experts is, so that it can be split.

    It reads `num_experts` on every call, because on each rank it is told how many are left.
    Rows are independent: what one token gets does not depend on the others. The order of the
    rows is free, a row may have been sent by another rank, and there is always one at least.
    """

    num_experts: int
    """Rows in dim 0 of each of its parameters."""

    def __call__(self, tokens_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """`mixed_TH`: the outputs of each token's K experts (ids below `num_experts`), times their
        weights, summed."""
        ...


def split_experts(
    model: nn.Module, layout: Layout, meshes: Meshes, ways: Ways | None = None
) -> nn.Module:
    """Leave each rank its share of a model's routed experts; returns the model.

    Before FSDP2 or DDP, after the pipeline's split; also on meta. A parameter becomes a DTensor,
    `Shard(0)` over `meshes.expert`, and keeps its name and its global shape. Expert e is on rank
    e // (num_experts / expert degree) of the group. Each rank cuts its share out of the weights it
    has, so ranks that hold different weights must be given the same ones before.

    Raises:
        PlanError: A module cannot be split. A pipeline stage without experts is left as it is;
            `check_expert` says whether the whole model has any.
    """
    if layout.expert == 1:
        return model
    found = dict(_routed_experts(model, ways))
    PlanError.raise_for(_check_modules(found, layout))
    sees_other_tokens = layout.tensor > 1 and layout.sequence_parallel
    for module in found.values():
        _split(module, meshes.expert, meshes.tensor.get_group() if sees_other_tokens else None)
    return model


def check_expert(model: nn.Module, layout: Layout, ways: Ways | None = None) -> Iterator[Problem]:
    """Whether the routed experts of a whole model, also on meta, can be shared as the layout says.

    Every rank of the group holds as many experts as every other.
    """
    if layout.expert == 1:
        return
    yield from check_expert_ranks(layout)
    found = dict(_routed_experts(model, ways))
    if not found:
        yield Problem(
            code="L010",
            what=f"layout.expert is {layout.expert}, and no routed experts are known in "
            f"{type(model).__name__}",
            where="layout.expert",
            fix="leave layout.expert out, or name the experts of a block in Ways.experts",
        )
    yield from _check_modules(found, layout)


def tensor_ways(ways: Ways, layout: Layout) -> Ways:
    """The ways to give `split_tensors`: without the routed experts, and without the sums that their
    blocks would leave with, where the experts are shared among `layout.expert` ranks."""
    if layout.expert == 1:
        return ways
    experts = {name for name, way in ways.tensor.items() if way == "experts"}
    sums = {
        name
        for name, way in ways.tensor.items()
        if way == "sum" and any(inside.startswith(f"{name}.") for inside in experts)
    }
    kept = {name: way for name, way in ways.tensor.items() if name not in experts | sums}
    return replace(ways, tensor=kept)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose experts `split_experts` has shared out."""
    return [module for module in model.modules() if hasattr(module, _IS_SPLIT)]


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Their parameters by full name: all that is not reduced over every sharer."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in model.named_modules()
        if hasattr(module, _IS_SPLIT)
        for name, parameter in module.named_parameters()
    }


def _routed_experts(model: nn.Module, ways: Ways | None) -> Iterator[tuple[str, nn.Module]]:
    """By full name: those that `ways` names, those that transformers marks, and lists of experts
    that transformers 4 runs one after the other."""
    inside = ways.experts if ways is not None else None
    blocks = block_modules(model, ways) if ways is not None and inside else ()
    named = {f"{block}.{inside}" for block, _ in blocks}
    for name, module in model.named_modules():
        is_marked = hasattr(module, "_is_expert_parallel")
        is_list = name.endswith(".experts") and isinstance(module, nn.ModuleList)
        if name in named or is_marked or is_list:
            yield name, module


def _check_modules(found: dict[str, nn.Module], layout: Layout) -> Iterator[Problem]:
    for name, module in found.items():
        reason = _why_not(module)
        if reason:
            yield Problem(
                code="L025",
                what=f"the routed experts `{name}` ({type(module).__name__}) cannot be shared "
                f"among {layout.expert} ranks: {reason}",
                where="layout.expert",
                fix="leave layout.expert out, or give the experts as paceline.runtime.strategy."
                "expert.Experts describes and name them in Ways.experts",
            )
        else:
            yield from check_experts(layout, name, module.num_experts)  # type: ignore[arg-type]


def _why_not(module: nn.Module) -> str | None:
    """What stands against splitting a module, or None."""
    is_foreign = type(module).__module__.startswith("transformers.")
    if is_foreign and type(module).__name__ not in PROVEN:
        return "this class has not been compared with one device"
    if isinstance(module, nn.ModuleList):
        return "it is a list of modules, not one module with a row for each expert"
    num_experts = getattr(module, "num_experts", None)
    if not isinstance(num_experts, int):
        return "it does not say `num_experts`"
    if buffers := [name for name, _ in module.named_buffers()]:
        return f"it has the buffer `{buffers[0]}`"
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 or parameter.shape[0] != num_experts:
            shape = " x ".join(str(size) for size in parameter.shape) or "a single number"
            return f"`{name}` is {shape}, without a row for each of {num_experts} experts"
        if isinstance(parameter, DTensor):
            return f"`{name}` is split already"
    return None


def _split(module: nn.Module, mesh: DeviceMesh, other_tokens: dist.ProcessGroup | None) -> None:
    """Keep this rank's experts, and send every other's tokens to it.

    `other_tokens`: ranks that hold the same experts and send other tokens, beside the dp x cp
    ranks.
    """
    total = int(module.num_experts)  # type: ignore[arg-type]
    num_local = total // mesh.size()
    first = num_local * mesh.get_local_rank()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            mine = parameter.detach()[first : first + num_local].clone()
            shared = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
            new = nn.Parameter(shared, requires_grad=parameter.requires_grad)
            owner.register_parameter(name, new)
    run_local = module.forward
    setattr(module, "num_experts", num_local)  # noqa: B010 - nn.Module types it as a tensor
    setattr(module, _IS_SPLIT, True)

    def run_mine(tokens_QH: Tensor, expert_Q1: Tensor, weight_Q1: Tensor) -> Tensor:
        with _LocalParameters(module, other_tokens):
            outputs_QH: Tensor = run_local(tokens_QH, expert_Q1, weight_Q1)
        return outputs_QH

    def forward(tokens_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        group = mesh.get_group()
        return run_spread_experts(run_mine, tokens_TH, expert_TK, weight_TK, num_local, group)

    module.forward = forward


class _LocalParameters:
    """While open, a module sees this rank's part of its DTensors; gradients go to the DTensors,
    summed over a group if there is one."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.module = module
        self.group = group
        self.shared: list[tuple[dict[str, Any], str, Tensor]] = []

    def __enter__(self) -> None:
        for owner in self.module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                self.shared.append((parameters_of(owner), name, parameter))
                mine = local_of(parameter)
                part = mine if self.group is None else copy_to(mine, self.group)
                parameters_of(owner)[name] = part

    def __exit__(self, *_: object) -> None:
        for parameters, name, parameter in self.shared:
            parameters[name] = parameter
