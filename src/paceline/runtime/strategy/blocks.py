"""Which modules are a model's blocks: the units of sharding, recompute and compilation."""

from collections.abc import Iterator
from typing import Protocol

from torch import nn

from paceline.runtime.strategy.pipeline.stages import Skip

WORTH_SHARDING = 0.1
"""Share of the model's parameters a list of blocks needs to be sharded block by block. A guess:
below it, the smaller gathered unit cannot matter much for memory."""


_LISTS = nn.ModuleList | nn.Sequential
_UNCALLED = nn.ModuleList | nn.ModuleDict
"""Containers that are never called: neither FSDP2 nor recompute can put anything around them."""


class HasBlocks(Protocol):
    """What is asked of a `Ways` here."""

    @property
    def blocks(self) -> str:
        """Dotted name of the list of blocks inside the model."""
        ...


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are called as a whole: a pipeline's parts on this rank, or the model."""
    parts = getattr(model, "parts", None)
    return list(parts) if isinstance(parts, nn.ModuleList) else [model]


def numbered_blocks(
    model: nn.Module, ways: HasBlocks | None = None
) -> Iterator[tuple[int, nn.Module]]:
    """This rank's blocks with their place in the whole model, from 0, which no layout changes.

    Args:
        ways: Says where the blocks are. Without it they are the model's longest repeated part.
    """
    for part in parts_of(model):
        if ways is None:
            found = repeated_blocks(part)
            yield from ((i, block) for i, block in enumerate(found) if not isinstance(block, Skip))
        else:
            blocks = part.get_submodule(ways.blocks).children()
            yield from ((i, block) for i, block in enumerate(blocks) if _num_parameters(block))


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of any module: the children of its outermost lists of same-typed modules.

    A list counts when it holds two modules or more and a tenth of the parameters, so a decoder
    gives its blocks, an encoder-decoder both stacks, and the experts inside a block do not count.
    Empty when the model has no such list.
    """
    enough = WORTH_SHARDING * _num_parameters(model)
    return list(_blocks_below(model, enough))


def _blocks_below(module: nn.Module, enough: float) -> Iterator[nn.Module]:
    if isinstance(module, _LISTS) and _is_stack(module, enough):
        yield from module.children()
        return
    for child in module.children():
        yield from _blocks_below(child, enough)


def _is_stack(module: nn.Module, enough: float) -> bool:
    children = list(module.children())
    if any(isinstance(child, _UNCALLED) for child in children):
        return False
    same_type = len({type(child) for child in children} - {Skip}) == 1
    return len(children) >= 2 and same_type and _num_parameters(module) >= max(enough, 1)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
