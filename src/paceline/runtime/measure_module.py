"""Helper process: count the model that a factory builds, without its memory.

    python -m paceline.runtime.measure_module FOLDER module:function

Prints one line of JSON, a `ModuleFacts`.
"""

import importlib
import sys

import msgspec
import torch
from torch import nn

from paceline.profile import BlockFacts, ModuleFacts
from paceline.runtime.strategy import repeated_blocks


def measure(model: nn.Module) -> ModuleFacts:
    """What planning needs to know of a module; shared parameters count once."""
    counted: set[nn.Parameter] = set()
    kinds: dict[tuple[str, int], int] = {}
    for block in repeated_blocks(model):
        new = set(block.parameters()) - counted
        counted |= new
        kind = (type(block).__name__, sum(p.numel() for p in new))
        kinds[kind] = kinds.get(kind, 0) + 1
    return ModuleFacts(
        num_parameters=sum(p.numel() for p in model.parameters()),
        blocks=tuple(
            BlockFacts(name=name, count=count, num_parameters=size)
            for (name, size), count in kinds.items()
        ),
    )


def main() -> None:
    """Entry point of the helper."""
    folder, name = sys.argv[1:]
    sys.path.insert(0, folder)
    module, _, function = name.partition(":")
    with torch.device("meta"):
        model = getattr(importlib.import_module(module), function)()
    if not isinstance(model, nn.Module):
        raise SystemExit(f"{name} returned a {type(model).__name__}, not an nn.Module")
    sys.stdout.buffer.write(msgspec.json.encode(measure(model)) + b"\n")


if __name__ == "__main__":
    main()
