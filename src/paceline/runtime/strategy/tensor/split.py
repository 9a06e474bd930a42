"""Tensor and sequence parallelism: the matrices of each block split over the tensor ranks.

Between the matrices every rank holds the same hidden states, or with sequence parallelism its share
of the tokens; the embedding's output and what a pipeline stage sends are always whole. A container
(attention, feed-forward) is entered once and left once, so a block costs two collectives forward
and two backward. Parameters become DTensors on `meshes.tensor`, also those held whole, so that
FSDP2 shards them further on the same root mesh.

Source: arXiv:1909.08053 (tensor), arXiv:2205.05198 (sequence).

Leaves out: splitting over experts, overlapping the collectives with the matrices.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.profile.ways import Way, Ways
from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.adapter.linear import ADAPTER, LORA_A, LORA_B, MAGNITUDE
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.product import is_transposed
from paceline.runtime.strategy.tensor.fused import SplitLinear, split_fused
from paceline.runtime.strategy.tensor.modules import (
    ColumnLinear,
    Crossings,
    HeadLinear,
    OnLocal,
    RowLinear,
    SplitExperts,
    VocabularyEmbedding,
    WideNorm,
    swap_class,
)
from paceline.runtime.strategy.tensor.randomness import SplitRandom
from paceline.runtime.strategy.tensor.rules import check_tensor_ways
from paceline.runtime.strategy.ways.ways import (
    block_modules,
    containers_of,
    is_inside,
    named_ways,
    written_out,
)

_KINDS: Mapping[str, type] = {
    "column": ColumnLinear,
    "row": RowLinear,
    "embedding": VocabularyEmbedding,
    "head": HeadLinear,
    "experts": SplitExperts,
    "wide norm": WideNorm,
}


def split_tensors(model: nn.Module, layout: Layout, meshes: Meshes, ways: Ways) -> nn.Module:
    """Leave each tensor rank its part of a model's matrices; returns the model.

    Before FSDP2 and after the split into pipeline stages. On meta, nothing is allocated; a model
    with values must have the same ones on all ranks of a tensor group, each of which keeps its part
    without communication. Linears in `ways.fused` are taken apart, so names change there.

    With dropout, the ranks of a tensor group must train from the same seed of torch's generator.

    Raises:
        PlanError: The degree does not divide something (`L005`), or a module cannot be split
            (`L020`).
    """
    if layout.tensor == 1:
        return model
    PlanError.raise_for(check_tensor_ways(model, layout, ways))
    split_fused(model, ways)
    named = _with_parts(model, named_ways(model, ways))
    containers = containers_of(model, ways, named)
    has_blocks = any(block_modules(model, ways))  # a stage with the head alone gets whole tokens
    crossings = Crossings(
        mesh=meshes.tensor,
        group=meshes.tensor.get_group(),
        tokens_split=layout.sequence_parallel and has_blocks,
        random=SplitRandom(meshes.tensor.get_local_rank()) if _has_dropout(model) else None,
    )
    for name, attributes in written_out(model, ways, ways.divided):
        for attribute in attributes:
            _divide(model.get_submodule(name), attribute, layout.tensor)
    for name, way in named.items():
        if way == "experts":
            _divide(model.get_submodule(name), "num_experts", layout.tensor)
    _split_parameters(model, named, meshes.tensor)
    for name in containers:
        container = model.get_submodule(name)
        container.register_forward_pre_hook(_OnInput(crossings.enter), with_kwargs=True)
        if named.get(name) == "sum":
            container.register_forward_hook(_OnOutput(crossings.leave))
    _change_modules(model, ways, named, containers, crossings)
    for name, way in named.items():
        if way == "join":
            model.get_submodule(name).register_forward_hook(_OnOutput(crossings.end))
    if crossings.tokens_split:
        _split_tokens(model, ways, named, crossings)
    return model


def loss_context(layout: Layout) -> AbstractContextManager[object]:
    """The context for the loss AND its backward pass.

    With tensor parallelism the logits are a DTensor split over the vocabulary. Inside this context
    `F.cross_entropy` computes on them without gathering, and gives a DTensor that every rank
    holds whole:

        logits_BSV = model(inputs_BS)
        with loss_context(layout):
            loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
            loss.backward()

    Nothing when the layout does not split tensors.
    """
    return loss_parallel() if layout.tensor > 1 else nullcontext()


def _with_parts(model: nn.Module, named: Mapping[str, Way]) -> dict[str, Way]:
    """The ways, with the parts of what was taken apart in its place."""
    result: dict[str, Way] = {}
    for name, way in named.items():
        module = model.get_submodule(name)
        if isinstance(module, SplitLinear):
            result |= {f"{name}.{part}": way for part, _ in module.named_children()}
        else:
            result[name] = way
    return result


def _split_parameters(model: nn.Module, named: Mapping[str, Way], mesh: DeviceMesh) -> None:
    """Every parameter as a DTensor on the tensor ranks; a tied one stays tied."""
    done: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        way = named.get(module_name)
        for name, parameter in parameters_of(module).items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if id(parameter) not in done:
                placement = _placement(module, name, way)
                done[id(parameter)] = _distributed(parameter, mesh, placement)
            parameters_of(module)[name] = done[id(parameter)]


def _placement(module: nn.Module, name: str, way: Way | None) -> Placement:
    if name in ADAPTER:
        splits = {("column", LORA_B): 0, ("column", MAGNITUDE): 0, ("row", LORA_A): 1}
        dim = splits.get((way or "", name))
        return Replicate() if dim is None else Shard(dim)
    if way in ("embedding", "experts", "wide norm") or (
        way in ("column", "head") and name == "bias"
    ):
        return Shard(0)
    if way in ("column", "head"):
        return Shard(1 if is_transposed(module) else 0)
    if way == "row" and name == "weight":
        return Shard(0 if is_transposed(module) else 1)
    return Replicate()


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """This rank's part, in storage of its own, so that the whole one is freed."""
    local = parameter.detach()
    if isinstance(placement, Shard):
        dim, rank = placement.dim, mesh.get_local_rank()
        size = local.shape[dim]
        length = -(-size // mesh.size())
        first = min(rank * length, size)
        local = local.narrow(dim, first, min(length, size - first)).clone()
    whole = DTensor.from_local(
        local.contiguous(),
        mesh,
        [placement],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _change_modules(
    model: nn.Module,
    ways: Ways,
    named: Mapping[str, Way],
    containers: set[str],
    crossings: Crossings,
) -> None:
    """Every module with parameters computes on its local ones from here on."""
    split_tokens = {name for name, _ in block_modules(model, ways)}
    if "head" in named.values():
        split_tokens |= set(ways.last)
    sums = {name for name, way in named.items() if way == "sum"}
    for name, module in list(model.named_modules()):
        if not any(isinstance(value, DTensor) for value in parameters_of(module).values()):
            continue
        way = named.get(name)
        inside = is_inside(name, containers) and way not in ("row", "behind")
        in_stretch = name in split_tokens or is_inside(name, split_tokens)
        is_summed = inside or (crossings.tokens_split and in_stretch)
        whole = {
            own
            for own, value in parameters_of(module).items()
            if isinstance(value, DTensor) and isinstance(value.placements[0], Replicate)
        }
        # What of an adapter is not split as its linear is: every rank has a part of its gradient.
        partial = set(ADAPTER) if way in ("column", "row") else set()
        swap_class(
            module,
            _KINDS.get(way or "", OnLocal),
            _crossings=crossings,
            _summed=frozenset(whole if is_summed else whole & partial),
            _crosses=_crosses(name, way, named, containers, sums),
        )


def _crosses(
    name: str, way: Way | None, named: Mapping[str, Way], containers: set[str], sums: set[str]
) -> bool:
    """Whether a module itself takes tensors from one region to another."""
    if way == "row":
        return not is_inside(name, sums)
    if way == "head":
        return "join" not in named.values()
    return not is_inside(name, containers)


def _split_tokens(
    model: nn.Module, ways: Ways, named: Mapping[str, Way], crossings: Crossings
) -> None:
    """Tokens are split before the first block here, and joined after the last or in the head."""
    blocks = [block for _, block in block_modules(model, ways)]
    blocks[0].register_forward_pre_hook(_OnInput(crossings.begin), with_kwargs=True)
    if "head" not in named.values():
        blocks[-1].register_forward_hook(_OnOutput(crossings.join))


class _OnInput:
    """Hands a module its hidden states: the first argument, or `hidden_states`."""

    def __init__(self, crossing: Callable[[Tensor], Tensor]) -> None:
        self.crossing = crossing

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (self.crossing(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.crossing(kwargs["hidden_states"])}


class _OnOutput:
    """Takes what a module gives to another region."""

    def __init__(self, crossing: Callable[[Tensor], Tensor]) -> None:
        self.crossing = crossing

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self.crossing(output[0]), *output[1:])
        return self.crossing(output)


def _divide(module: nn.Module, attribute: str, degree: int) -> None:
    """Divide a number the module knows; one of its configuration in a copy of its own."""
    holder: Any = module
    *path, last = attribute.split(".")
    for step in path:
        setattr(holder, step, copy.copy(getattr(holder, step)))
        holder = getattr(holder, step)
    setattr(holder, last, getattr(holder, last) // degree)


def _has_dropout(model: nn.Module) -> bool:
    """Whether some module has a rate of dropout: a float above 0 whose name says so."""
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or name == "p")
        for module in model.modules()
        for name, value in vars(module).items()
    )
