"""The model of a request on the meta device, whole or with fewer blocks, and its memory given."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from paceline.prove.proof import ModelRequest
from paceline.runtime.decoder import Decoder
from paceline.runtime.models import build_own
from paceline.runtime.strategy.adapter.place import add_adapters
from paceline.runtime.strategy.blocks import repeated_blocks
from paceline.runtime.strategy.ways.find import ways_of


def build(request: ModelRequest, seq_len: int) -> nn.Module:
    """The whole model on meta: shapes and no memory.

    Raises:
        JobError: The factory cannot be imported, raises or returns no module; transformers is
            missing or has no such model.
    """
    with torch.device("meta"), _uninitialised():
        model = _build(request, seq_len)
        return model if request.adapters is None else add_adapters(model, request.adapters)


def _build(request: ModelRequest, seq_len: int) -> nn.Module:
    if request.decoder is not None:
        return Decoder(request.decoder, seq_len)
    if request.config is not None:
        from paceline.runtime.huggingface import build_hf

        return build_hf(request.config)
    assert request.factory is not None, "one of the three ways is given"
    return build_own(Path(request.folder), request.factory)


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Drawing initial values is left out: on meta it is worked out op by op, for nothing."""

    def unchanged(self: Tensor, *_: Any, **__: Any) -> Tensor:
        return self

    with ExitStack() as stack:
        for name in ("normal_", "uniform_"):
            stack.enter_context(patch.object(Tensor, name, unchanged, create=True))
        yield


def num_blocks(model: nn.Module) -> int:
    """Blocks in the model's list of blocks; 0 when it has none, or several."""
    holder = _holder(model)
    return 0 if holder is None else len(holder)


def signatures(model: nn.Module) -> list[object]:
    """What tells blocks apart: equal ones do the same work on the same shapes."""
    holder = _holder(model)
    return [] if holder is None else [_signature(block) for block in holder.children()]


def keep_blocks(model: nn.Module, kept: Callable[[int], int]) -> None:
    """Leave only the first blocks in the list; the others are gone from the model."""
    holder = _holder(model)
    assert holder is not None, "only a model with one list of blocks is pruned"
    for index in range(kept(len(holder)), len(holder)):
        delattr(holder, str(index))


def _holder(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The one module that holds all blocks in order."""
    ways = ways_of(model)
    if ways is not None:
        found = model.get_submodule(ways.blocks)
        return found if isinstance(found, nn.ModuleList | nn.Sequential) else None
    blocks = repeated_blocks(model)
    for module in model.modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        if is_list and blocks and list(module.children()) == blocks:
            return module  # type: ignore[return-value]
    return None


def _signature(block: nn.Module) -> object:
    """Types of its modules, shapes of its parameters, and their plain settings."""
    modules = tuple(
        (name, type(module), tuple(sorted(_settings(module))))
        for name, module in block.named_modules()
    )
    return modules, tuple((name, p.shape) for name, p in block.named_parameters())


def _settings(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        is_place = name.startswith("_") or name in ("layer_idx", "layer_id", "training")
        if not is_place and isinstance(value, int | float | str | bool | None):
            yield name, repr(value)
