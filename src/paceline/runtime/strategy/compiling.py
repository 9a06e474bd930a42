"""torch.compile, one block at a time.

Blocks are alike, so what is compiled for the first is used for all; a graph of the whole model
would take minutes and break at FSDP2's hooks. A block's `forward` is replaced in place, after
`recompute_blocks` and before `shard`: recompute is inside what is compiled, where the compiler sees
both passes, and FSDP2 outside.
"""

import shutil
from collections.abc import Iterator

import torch
from torch import nn

from paceline.errors import PlanError, Problem
from paceline.runtime._torch_private import has_triton
from paceline.runtime.strategy.blocks import HasBlocks, numbered_blocks
from paceline.runtime.strategy.context.documents import COMPILED


def compile_blocks(
    model: nn.Module,
    ways: HasBlocks | None = None,
    *,
    device_type: str = "cpu",
    backend: str = "inductor",
) -> nn.Module:
    """Have a model's blocks compiled at their first call; returns the model.

    Fused operations round otherwise than single ones: results are close to those without, not equal
    in every bit. `aot_eager` as the backend captures the graphs and compiles nothing, for tests.

    Raises:
        PlanError: There is no compiler, or the model has no blocks.
    """
    blocks = [block for _, block in numbered_blocks(model, ways)]
    PlanError.raise_for(check_compiler(device_type, num_blocks=len(blocks)))
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)
        setattr(block, COMPILED, True)
    return model


def check_compiler(device_type: str, *, num_blocks: int = 1) -> Iterator[Problem]:
    """Whether this machine can compile a model's blocks."""
    reasons = {}
    if num_blocks == 0:
        reasons["train.compile compiles a model's blocks, and this model has no list of them"] = (
            "leave train.compile out, or say where the blocks are in Ways.blocks"
        )
    if device_type == "cpu" and not _has_cpp_compiler():
        reasons["torch.compile needs a C++ compiler for a CPU, and there is no g++ or clang++"] = (
            "install one (apt install g++), or leave train.compile out"
        )
    if device_type == "cuda" and not has_triton():
        reasons["torch.compile needs Triton for a GPU, and this torch has none"] = (
            "install triton for this torch, or leave train.compile out"
        )
    for what, fix in reasons.items():
        yield Problem(code="R035", what=what, where="train.compile", fix=fix)


def _has_cpp_compiler() -> bool:
    """Those that torch looks for first, or what CXX names."""
    import os

    names = [os.environ.get("CXX"), "g++", "clang++"]
    return any(name and shutil.which(name) for name in names)
