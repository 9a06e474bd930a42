"""Where in the step and in the model an operation happens: phase, micro-batch and module.

Forward passes are followed by hooks on all modules. A backward pass runs no modules, but each of
its nodes has the sequence number it was given in the forward pass, and the hooks noted which module
was running at which number.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.runtime._torch_private import backward_node, sequence_number

NEVER = 2**62
"""Sequence numbers above belong to no forward operation: those of AccumulateGrad."""

_WRAPPINGS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class Place(NamedTuple):
    """Phase, micro-batch, module and what of the model that is."""

    phase: str
    micro_batch: int
    chunk: int
    """The pipeline's stage (virtual ones counted) that runs; 0 without a pipeline."""

    module: str
    block: int | None
    """Index among the blocks; None outside of them."""

    again: bool
    """Whether a forward pass is computed again inside the backward pass."""


class Places:
    """Follows a step. `now()` says where it is; a driver sets the phase around the optimizer."""

    def __init__(self) -> None:
        self.phase = "forward"
        self.micro_batch = 0
        self.chunk = 0
        self.fixed_phase: str | None = None
        self._names: dict[nn.Module, str] = {}
        self._blocks: dict[str, int] = {}
        self._stack: list[str] = []
        self._starts: list[int] = [0]
        self._at: list[str] = [""]
        self._roots: set[nn.Module] = set()
        self._module = ""
        self._hooks: list[Any] = []
        self._heads: set[nn.Module] = set()
        self.on_logits: Callable[[Any], None] = lambda _: None
        """Told what the output matrix gave."""

    def watch(self, model: nn.Module, blocks: Iterable[tuple[int, nn.Module]]) -> None:
        """Follow a model's modules. Call after it is wrapped, with its numbered blocks."""
        self._roots.add(model)
        inner = getattr(model, "module", None)
        prefix = "module." if isinstance(inner, nn.Module) else ""
        for name, module in model.named_modules():
            for wrapping in _WRAPPINGS:
                name = name.replace(wrapping, "")
            self._names.setdefault(module, name.removeprefix(prefix).rstrip("."))
        for index, block in blocks:
            name = self._names.get(block)
            if name is not None:
                self._blocks[name] = index
        self._heads |= {
            module
            for module, name in self._names.items()
            if isinstance(module, nn.Linear) and self.block_of(name) is None
        }

    def __enter__(self) -> "Places":
        on_module = torch.nn.modules.module
        self._hooks = [
            on_module.register_module_forward_pre_hook(self._enter),
            # Also after an exception, by which a checkpoint stops computing again.
            on_module.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def now(self) -> Place:
        """The place of the operation that is about to run."""
        node: Any = backward_node()
        if self.fixed_phase is not None:
            self.phase, self._module = self.fixed_phase, ""
        elif node is not None:
            self.phase = "weights" if self.phase == "weights" else "backward"
            if self._stack:
                self._module = self._stack[-1]
            else:
                self._find(node)
        elif self._stack:
            self.phase, self._module = "forward", self._stack[-1]
        elif self.phase == "forward":
            self.phase, self._module = "loss", ""
        again = node is not None and bool(self._stack)
        module = self._module
        return Place(self.phase, self.micro_batch, self.chunk, module, self.block_of(module), again)

    def block_of(self, module: str) -> int | None:
        """The block a module is in or is."""
        found = self._blocks.get(module)
        while found is None and module:
            module = module.rpartition(".")[0]
            found = self._blocks.get(module)
        return found

    def at_stage(self, stage: int, micro_batch: int, phase: str) -> None:
        """A pipeline goes on with another stage or micro-batch."""
        self.chunk, self.micro_batch = stage, micro_batch
        self.phase, self._module = phase, ""

    def _find(self, node: Any) -> None:
        number = sequence_number(node)
        if 0 <= number < NEVER:
            self._module = self._at[bisect_right(self._starts, number) - 1]

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module in self._roots and backward_node() is None:
            self.micro_batch += 1
        self._stack.append(self._names.get(module, self._stack[-1] if self._stack else ""))
        self._note()

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if module in self._heads:
            self.on_logits(output)
        if self._stack:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        number = sequence_number()
        name = self._stack[-1] if self._stack else ""
        if self._starts[-1] == number:
            self._at[-1] = name
        else:
            self._starts.append(number)
            self._at.append(name)
