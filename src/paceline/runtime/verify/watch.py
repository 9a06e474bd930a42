"""Read every module's output while a model runs, so that the first wrong one can be named.

A reading is four numbers of a whole tensor, and readings of parts add up. So ranks that hold parts
of an output, in whatever way it is split, are compared with a single device without sending it.

Leaves out: outputs of functions that are no modules (they are seen in the next module's input), and
what is computed again in the backward pass.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.record.verification import Reading
from paceline.runtime._torch_private import backward_node, tree_leaves
from paceline.runtime.strategy.local import unwrapped
from paceline.runtime.strategy.pipeline.stages import Nothing, Skip


class Watch:
    """The readings of one step."""

    def __init__(self) -> None:
        self.modules: dict[str, Reading] = {}
        """Module -> of its outputs, in the order in which they were first called."""

        self.inputs: dict[str, Reading] = {}
        """Module -> of what went in."""

    def clear(self) -> None:
        self.modules, self.inputs = {}, {}

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        hooks = []
        inner = unwrapped(model)
        for name, module in inner.named_modules():
            plain = _plain_name(name)
            if not plain or isinstance(module, nn.ModuleList | nn.ModuleDict | Skip | Nothing):
                continue
            hooks.append(module.register_forward_pre_hook(self._before(plain), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._after(plain)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, name: str) -> Any:
        def read(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _note(self.inputs, name, (args, kwargs))

        return read

    def _after(self, name: str) -> Any:
        def read(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            _note(self.modules, name, output)

        return read


def _plain_name(name: str) -> str:
    """A module's name, the same in every layout."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


@torch.no_grad()
def _note(readings: dict[str, Reading], name: str, value: Any) -> None:
    if backward_node() is not None:  # computed again in the backward pass
        return
    found = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    found = [each for each in found if each.is_floating_point()]
    if found:
        new = read_tensor(found[0])
        readings[name] = new if name not in readings else add_readings(readings[name], new)


def read_tensor(tensor: Tensor) -> Reading:
    """The reading of a tensor; of a DTensor's whole. Collective then."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    wide = whole.double()
    return Reading(
        count=wide.numel(),
        total=float(wide.sum()),
        squares=float(wide.square().sum()),
        largest=float(wide.abs().max()) if wide.numel() else 0.0,
    )


def add_readings(one: Reading, other: Reading) -> Reading:
    """The reading of two parts together."""
    largest = max(one.largest, other.largest)
    if math.isnan(one.largest) or math.isnan(other.largest):
        largest = math.nan
    return Reading(
        count=one.count + other.count,
        total=one.total + other.total,
        squares=one.squares + other.squares,
        largest=largest,
    )
