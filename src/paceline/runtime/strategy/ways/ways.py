"""The modules of a model that its `Ways` name.

Known models have theirs in `profile.ways`; a model of another kind carries its own as
`paceline_ways`, is given one, or is read by `generic_ways`.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import nn

from paceline.profile.ways import Way, Ways

T = TypeVar("T")


def block_modules(model: nn.Module, ways: Ways) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each block this rank holds, in order.

    A block of another pipeline stage has no parameters and is left out.
    """
    blocks = model.get_submodule(ways.blocks)
    for name, block in blocks.named_children():
        if next(block.parameters(), None) is not None:
            yield f"{ways.blocks}.{name}", block


def named_ways(model: nn.Module, ways: Ways) -> dict[str, Way]:
    """Name of each module that is here -> its way, with `*.` written out for every block."""
    return dict(written_out(model, ways, ways.tensor))


def written_out(model: nn.Module, ways: Ways, table: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    blocks = dict(block_modules(model, ways))
    for name, value in table.items():
        if not name.startswith("*."):
            if _has(model, name):
                yield name, value
            continue
        inside = name.removeprefix("*.")
        for place, block in blocks.items():
            if _has(block, inside):
                yield f"{place}.{inside}", value


def containers_of(model: nn.Module, ways: Ways, named: Mapping[str, Way]) -> set[str]:
    """Modules inside blocks that are entered as a whole: named so, or the parents of rows."""
    blocks = {name for name, _ in block_modules(model, ways)}
    parents = {name.rpartition(".")[0] for name, way in named.items() if way == "row"}
    named_so = {name for name, way in named.items() if way in ("gather", "sum")}
    outer = {name for name in parents - blocks if not is_inside(name, named_so)}
    return named_so | outer


def is_inside(name: str, containers: set[str]) -> bool:
    """Whether a module is below one of these."""
    return any(name.startswith(f"{container}.") for container in containers)


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module of that name is here, and not only the place of another stage's."""
    try:
        found = module.get_submodule(name)
    except AttributeError:
        return False
    return next(found.parameters(), None) is not None
