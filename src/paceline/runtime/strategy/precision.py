"""Which type the matrix multiplications run in. Parameters and optimizer state stay float32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from paceline.parallel.layout import Layout

Precision = Literal["fp32", "bf16"]


def autocast(
    precision: Precision, device: torch.device | str, layout: Layout
) -> AbstractContextManager[object]:
    """The context for the forward pass and the loss of one micro-batch.

    bf16 is autocast where every rank holds whole float32 parameters. FSDP2 casts the gathered
    parameters itself (half the bytes on the wire), so there it is nothing at all.
    """
    if precision == "fp32" or casts_itself(layout):
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def casts_itself(layout: Layout) -> bool:
    """Whether the wrapped model casts its own parameters: sharded over more than one rank."""
    return layout.shard_degree > 1
