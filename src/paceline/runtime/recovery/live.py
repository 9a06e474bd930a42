"""What a rank would have to be given back, as it lies in memory, and room for it in a new process.

Unlike `state.named_state`, which says where each part belongs in the whole model so that any layout
can read it, this is one rank's own: the same layout and the same rank read it back, or a replica.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime.optimizer.sharded import like
from paceline.runtime.state import MODEL, OPTIMIZER, trained_parameters
from paceline.runtime.strategy.initial import SavedBuffers
from paceline.runtime.strategy.local import local_of

BUFFERS = MODEL + "buffers/"
"""What names of saved buffers begin with."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a rank's state, without its numbers."""

    name: str
    dtype: str
    """As torch names it: `float32`."""

    shape: tuple[int, ...]
    whole: tuple[int, ...] | None
    """Shape of the tensor that it is a part of; None for a plain tensor."""

    on_host: bool

    @property
    def num_bytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size * prod(self.shape)


class LiveState:
    """Parameters, saved buffers and optimizer state of one rank.

    Made when parameters are as the optimizer has them: not between the micro-batches of a step,
    when FSDP2 may show gathered ones. After that it may be asked at any time.

    Leaves out: optimizer state that is no tensor, as `AdamW` of torch before 1.12 counted steps.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = trained_parameters(model)
        self._buffers = SavedBuffers(model)
        self._optimizer = optimizer

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each by name, the live memory; the same order on every replica.

        `model/blocks.0.ffn.up.weight`, `model/buffers/0`,
        `optimizer/blocks.0.ffn.up.weight/exp_avg`.
        """
        return ((name, local_of(value.detach())) for name, value in self._values())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def entries(self) -> list[Entry]:
        """What there is, in the order of `tensors`."""
        return [entry_of(name, value) for name, value in self._values()]

    def make_room(self, entries: Iterable[Entry]) -> None:
        """Give the optimizer state of these shapes, for numbers to be copied into; what it has of
        the kind stays. Afterwards `tensors` has exactly these.

        Raises:
            ValueError: The model is another one, or split in another way.
        """
        wanted = list(entries)
        held = {name: entry_of(name, value) for name, value in self._values()}
        for entry in wanted:
            if entry.name.startswith(OPTIMIZER):
                if held.get(entry.name) != entry:
                    self._add(entry)
            elif held.get(entry.name) != entry:
                raise ValueError(f"{entry.name} is {held.get(entry.name)} here, and was {entry}")
        names = {entry.name for entry in wanted}
        for name in held.keys() - names:
            if not name.startswith(OPTIMIZER):
                raise ValueError(f"{name} is here, and was not there")
            parameter, key = self._place(name)
            del self._optimizer.state[parameter][key]
        if [entry.name for entry in self.entries()] != [entry.name for entry in wanted]:
            raise ValueError("the tensors are in another order than they were")

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield MODEL + name, parameter
        for index, buffer in enumerate(self._buffers.tensors()):
            yield f"{BUFFERS}{index}", buffer
        for name, parameter in self._parameters.items():
            state: dict[Any, Any] = self._optimizer.state.get(parameter, {})
            for key in sorted(state, key=str):
                if isinstance(state[key], Tensor):
                    yield f"{OPTIMIZER}{name}/{key}", state[key]

    def _place(self, name: str) -> tuple[nn.Parameter, str]:
        owner, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
        if owner not in self._parameters:
            raise ValueError(f"there is no parameter {owner} here")
        return self._parameters[owner], key

    def _add(self, entry: Entry) -> None:
        parameter, key = self._place(entry.name)
        dtype = getattr(torch, entry.dtype)
        device = torch.device("cpu") if entry.on_host else local_of(parameter.detach()).device
        value: Tensor = torch.zeros(entry.shape, dtype=dtype, device=device)
        if entry.whole is not None and tuple(parameter.shape) == entry.whole:
            value = torch.zeros_like(parameter.detach(), dtype=dtype)
        elif entry.whole is not None:
            value = like(parameter, value, entry.whole)
        if entry_of(entry.name, value) != entry:
            raise ValueError(
                f"{entry.name} would be {entry_of(entry.name, value)}, and was {entry}"
            )
        self._optimizer.state[parameter][key] = value


def entry_of(name: str, value: Tensor) -> Entry:
    """What there is of a tensor that may be a part of one."""
    local = local_of(value.detach())
    return Entry(
        name=name,
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(local.shape),
        whole=tuple(value.shape) if isinstance(value, DTensor) else None,
        on_host=local.device.type == "cpu",
    )
