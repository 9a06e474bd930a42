"""Helper process: count the model that a factory builds, without its memory.

    python -m paceline.runtime.measure_module FOLDER module:function

Prints one line of JSON, a `ModuleFacts`.
"""

import importlib
import sys

import msgspec
import torch
from torch import nn

from paceline.profile import ModuleFacts
from paceline.runtime.strategy import repeated_blocks


def measure(model: nn.Module) -> ModuleFacts:
    """What planning needs to know of a module; shared parameters count once."""
    blocks = repeated_blocks(model)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    return ModuleFacts(
        num_parameters=sum(p.numel() for p in model.parameters()),
        largest_block_parameters=max(sizes, default=0),
        num_blocks=len(blocks),
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
