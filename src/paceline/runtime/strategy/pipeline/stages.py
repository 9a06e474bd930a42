"""One stage of a pipeline, cut out of a model: every module keeps its name.

Modules of other stages are replaced by stand-ins without parameters, so the model's own `forward`
runs on every stage: hidden states go in where tokens would, and come out where logits would.

Leaves out: which blocks a stage gets (`parallel.stages`), and running it (`pipeline`).
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import PlanError, Problem
from paceline.parallel.layout import Layout
from paceline.parallel.stages import blocks_of_stages, stages_of_rank
from paceline.profile.runnable import SPLIT
from paceline.runtime.strategy.ways.peft import is_peft

ENTERS_AT_BLOCKS = "_paceline_plain_call"
"""Attribute of models whose hidden states enter at the first block, whatever the model does to its
embeddings: those of `runtime.huggingface.as_plain_model`."""


class StageWays(Protocol):
    """The part of `Ways` that is read here."""

    @property
    def blocks(self) -> str:
        """Dotted name of the list of blocks."""

    @property
    def first(self) -> tuple[str, ...]:
        """Modules that only the first stage needs; the token embedding comes first."""

    @property
    def last(self) -> tuple[str, ...]:
        """Modules that only the last stage needs."""

    @property
    def experts(self) -> str | None:
        """Name of the routed experts inside a block."""


class Skip(nn.Module):
    """In place of a module of another stage: its first argument comes back."""

    def forward(self, hidden_BSH: Any, *_: Any, **__: Any) -> Any:
        return hidden_BSH


class Nothing(nn.Module):
    """In place of a second embedding (positions) of another stage: adds nothing."""

    def forward(self, index: Tensor, *_: Any, **__: Any) -> Tensor:
        return index.new_zeros((), dtype=self.dtype)

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.dtype = dtype


def take_stage(
    model: nn.Module, ways: StageWays, blocks: range, *, is_first: bool, is_last: bool
) -> nn.Module:
    """A model like the given one with the modules of one stage; they are the given one's own.

    Only the containers on the way to blocks, first and last modules are copied. A module outside
    them that has no parameters, such as a table of positions, is on every stage, and shared.

    Args:
        model: Whole, also on meta. It is left as it is.
        blocks: Indices of this stage's blocks; it may be empty.
    """
    containers = _containers(ways)
    memo: dict[int, Any] = {}
    for container in containers:
        for name, child in model.get_submodule(container).named_children():
            path = f"{container}.{name}" if container else name
            if path in containers:
                continue
            is_here = True
            if container == ways.blocks:
                is_here = int(name) in blocks
            elif path in ways.first:
                is_here = is_first
            elif path in ways.last:
                is_here = is_last
            memo[id(child)] = child if is_here else _stand_in(path, child, ways)
    stage: nn.Module = copy.deepcopy(model, memo)
    return stage


def check_stages(model: nn.Module, ways: StageWays) -> Iterator[Problem]:
    """Whether every parameter of the whole model belongs to exactly one stage, also on meta."""
    if is_peft(model):
        yield _problem(model, "models of peft are not split over stages")
        return
    containers = _containers(ways)
    of_stages = (*ways.first, *ways.last)
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    missing = [name for name in (ways.blocks, *of_stages) if name not in names]
    if missing:
        yield _problem(model, f"Ways names {', '.join(missing)}, which it does not have")
        return
    inside = tuple(f"{name}." for name in (ways.blocks, *of_stages))
    stray = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not name.startswith(inside)
    ]
    if stray:
        listed = ", ".join(stray[:4]) + (" ..." if len(stray) > 4 else "")
        yield _problem(model, f"no stage is named for {len(stray)} parameters: {listed}")
    for second, first in tied_ends(model, ways).items():
        if {_stage_of(second, ways), _stage_of(first, ways)} != {"first", "last"}:
            yield _problem(model, f"`{first}` and `{second}` are one parameter on several stages")
    if hasattr(model, ENTERS_AT_BLOCKS):
        family = getattr(model.config, "model_type", None)
        if family not in SPLIT:
            yield _problem(model, f"stages of {family} have not been compared with the whole model")
        return
    for container in containers:
        for name, child in model.get_submodule(container).named_children():
            path = f"{container}.{name}" if container else name
            if isinstance(child, nn.Dropout) and child.p > 0 and path not in of_stages:
                yield _problem(model, f"every stage would apply `{path}` once more")
    if not missing and not stray:
        yield from _check_chain(model, ways)


def _check_chain(model: nn.Module, ways: StageWays) -> Iterator[Problem]:
    """Whether hidden states go from block to block and nothing else happens to them.

    Tried with a stage that has none of the modules: what goes in must come out. A forward that
    adds each block's input to its output itself would double it for every block that is elsewhere.
    """
    hidden_BSH = torch.arange(1.0, 1 + 2 * hidden_width(model, ways)).view(1, 2, -1)
    empty = take_stage(model, ways, range(0), is_first=False, is_last=False)
    why = "its forward is more than hidden = block(hidden) between the blocks of a pipeline's stage"
    try:
        with torch.no_grad():
            output = empty(hidden_BSH)
    except Exception as error:  # noqa: BLE001 - the model's own code, whatever it raises
        yield _problem(model, f"{why}: given hidden states and no blocks it raised {error}")
        return
    is_same = output is hidden_BSH
    if not is_same and not (isinstance(output, Tensor) and torch.equal(output, hidden_BSH)):
        yield _problem(model, f"{why}: without blocks it does not hand on what it is given")


def head_in_blocks(model: nn.Module, ways: StageWays) -> float:
    """Time of the output matrix in blocks, by the parameters a token goes through.

    Of routed experts those count that a token is sent to, as in the planner. 0 without a head.
    """
    blocks = list(model.get_submodule(ways.blocks).children())
    used = sum(_used_parameters(block, model, ways) for block in blocks)
    head = sum(
        parameter.numel()
        for name in ways.last
        for parameter in model.get_submodule(name).parameters()
        if parameter.dim() > 1
    )
    return head * len(blocks) / max(used, 1.0)


def blocks_of(model: nn.Module, ways: StageWays, layout: Layout) -> tuple[range, ...]:
    """The blocks of each stage of a whole model. Only a head that is trained stands alone."""
    count = len(list(model.get_submodule(ways.blocks).children()))
    bare = _is_trained(model, ways.last) or not any(p.requires_grad for p in model.parameters())
    return blocks_of_stages(layout, count, head_in_blocks(model, ways), may_be_bare=bare)


def check_trained(
    model: nn.Module, ways: StageWays, layout: Layout, blocks: Sequence[range]
) -> Iterator[Problem]:
    """Whether each rank of the pipeline has something to train, where the model is trained."""
    stages = [_is_trained(model, [f"{ways.blocks}.{n}" for n in each]) for each in blocks]
    stages[0] |= _is_trained(model, ways.first)
    stages[-1] |= _is_trained(model, ways.last)
    idle = [
        rank
        for rank in range(layout.pipeline)
        if not any(stages[stage] for stage in stages_of_rank(layout, rank))
    ]
    if idle and any(stages):
        held = [blocks[stage] for stage in stages_of_rank(layout, idle[0])]
        spelled = ", ".join(f"{each.start} to {each.stop - 1}" for each in held if each)
        yield Problem(
            code="L030",
            what=f"{len(idle)} of {layout.pipeline} pipeline ranks would have nothing to train: "
            f"every parameter of rank {idle[0]} (blocks {spelled or 'none'}) is frozen",
            where="layout.pipeline",
            fix="train something in those blocks (train.adapter.targets, or the model's own "
            "requires_grad), or set layout.pipeline to 1",
        )


def _is_trained(model: nn.Module, names: Iterable[str]) -> bool:
    return any(p.requires_grad for name in names for p in model.get_submodule(name).parameters())


def hidden_width(model: nn.Module, ways: StageWays) -> int:
    """H, the width of the residual stream that goes from stage to stage."""
    config = getattr(model, "config", None) or getattr(model, "shape", None)
    for name in ("hidden_size", "n_embd", "hidden"):
        if isinstance(width := getattr(config, name, None), int):
            return width
    for path in ways.first:
        embedding = model.get_submodule(path)
        if isinstance(embedding, nn.Embedding):
            return embedding.embedding_dim
    raise PlanError(
        _problem(model, "the width of its residual stream is unknown: it has no token embedding")
    )


def tied_ends(model: nn.Module, ways: StageWays) -> dict[str, str]:
    """Names of each parameter that a first and a last module share: second name -> first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if _stage_of(original, ways) != _stage_of(name, ways):
            tied[name] = original
    return tied


def _stage_of(name: str, ways: StageWays) -> str:
    if name.startswith(tuple(f"{path}." for path in ways.first)):
        return "first"
    if name.startswith(tuple(f"{path}." for path in ways.last)):
        return "last"
    return name.removeprefix(f"{ways.blocks}.").partition(".")[0]


def _containers(ways: StageWays) -> list[str]:
    """Names of all modules on the way to those that stages share out, the model itself first."""
    found = {ways.blocks, ""}
    for path in (ways.blocks, *ways.first, *ways.last):
        parts = path.split(".")
        found |= {".".join(parts[:depth]) for depth in range(len(parts))}
    return sorted(found)


def _stand_in(path: str, module: nn.Module, ways: StageWays) -> nn.Module:
    if path in ways.first[1:] and isinstance(module, nn.Embedding):
        return Nothing(module.weight.dtype)
    return Skip()


def _used_parameters(block: nn.Module, model: nn.Module, ways: StageWays) -> float:
    total = float(sum(parameter.numel() for parameter in block.parameters()))
    config = getattr(model, "config", None)
    per_token = getattr(config, "num_experts_per_tok", None)
    names = {name for name, _ in block.named_modules()}
    if ways.experts not in names or ways.experts is None or not isinstance(per_token, int):
        return total
    experts = block.get_submodule(ways.experts)
    num_experts = getattr(experts, "num_experts", per_token)
    routed = sum(parameter.numel() for parameter in experts.parameters())
    return total - routed * (1 - per_token / num_experts)


def _problem(model: nn.Module, why: str) -> Problem:
    return Problem(
        code="L030",
        what=f"{type(model).__name__} cannot be cut into pipeline stages: {why}",
        where="layout.pipeline",
        fix="name every module outside the blocks in Ways.first or Ways.last, or set "
        "layout.pipeline to 1",
    )
