"""The functions that an adapted script gets: only those it calls, as plain text.

They stand in the script itself, so that it needs nothing but PyTorch (or Accelerate) and a reader
sees all of what runs.
"""

from collections.abc import Iterable, Mapping

from paceline.adapt.helper import Helper
from paceline.adapt.helpers_accelerate import ACCELERATE
from paceline.adapt.helpers_fsdp2 import FSDP2
from paceline.adapt.helpers_torch import DDP
from paceline.adapt.result import Target

HELPERS: Mapping[Target, Mapping[str, Helper]] = {
    Target.DDP: DDP,
    Target.FSDP2: FSDP2,
    Target.ACCELERATE: ACCELERATE,
}

ON_CPU: Mapping[str, str] = {
    'torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")': (
        'torch.device("cpu")'
    ),
    "cpu=not torch.accelerator.is_available()": "cpu=True",
}
"""What changes in the helpers of a script that trains on the CPU."""


def with_needs(target: Target, names: Iterable[str]) -> list[str]:
    """The names and all that they need, in the order they are defined."""
    table = HELPERS[target]
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
    table = HELPERS[target]
    found: list[str] = []
    for name in names:
        found.append(name)
        if name == "RANK":
            found += ["LOCAL_RANK", "WORLD_SIZE"]
        for line in table[name].imports:
            found += [each.strip() for each in line.rsplit(" ", 1)[-1:]]
    return found
