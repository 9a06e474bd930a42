"""The functions that an adapted script gets: only those it calls, as plain text.

They stand in the script itself, so that it needs nothing but PyTorch (or Accelerate) and a reader
sees all of what runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from paceline.adapt.result import Target
from paceline.catalog.load import read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """One name that the script gets, as `helpers.toml` has it."""

    text: Annotated[str, str] = ""
    imports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@cache
def helpers_of(target: Target) -> Mapping[str, Helper]:
    """Name -> helper of a form, in the order in which they are defined."""
    forms = (target,) if target is Target.ACCELERATE else ("torchrun", target)
    rows = read_rows("helpers.toml", Helper, key=None)
    keys = [key.partition(".") for key in rows]
    return {name: rows[f"{form}.{name}"] for form, _, name in keys if form in forms}


ON_CPU: Mapping[str, str] = {
    'torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")': (
        'torch.device("cpu")'
    ),
    "cpu=not torch.accelerator.is_available()": "cpu=True",
}
"""What changes in the helpers of a script that trains on the CPU."""


def with_needs(target: Target, names: Iterable[str]) -> list[str]:
    """The names and all that they need, in the order they are defined."""
    table = helpers_of(target)
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(table[name].needs)
    return [name for name in table if name in found]


def bound_names(target: Target, names: Iterable[str]) -> list[str]:
    """What the helpers bind in the script: their own names and those of their imports."""
    table = helpers_of(target)
    found: list[str] = []
    for name in names:
        found.append(name)
        if name == "RANK":
            found += ["LOCAL_RANK", "WORLD_SIZE"]
        for line in table[name].imports:
            found += [each.strip() for each in line.rsplit(" ", 1)[-1:]]
    return found
