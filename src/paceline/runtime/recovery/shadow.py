"""A copy of another rank's parameters and optimizer state that is moved on by its gradients alone.

The copy begins as all of the other rank's state. From then on only its reduced gradients come, as
they are before they are clipped, and the same optimizer is run on plain tensors of the same shapes:
its numbers are the owner's to the bit, because an element-wise update of a shard reads nothing but
the shard, its gradient and a few numbers that are the same on all ranks.

It lies on a device of the owner's kind: host memory beside a CPU's or an offloaded state, and the
accelerator's beside an accelerator's, where a host's own arithmetic would end with other bits.

Leaves out: who keeps whose, and how anything is sent (`shadows.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from paceline.runtime.optimizer.adamw_8bit import AdamW8bit
from paceline.runtime.recovery.live import BUFFERS, Entry, LiveState, entry_of
from paceline.runtime.recovery.newest import Copy
from paceline.runtime.state import MODEL, OPTIMIZER, Stored, model_state, named_parameters
from paceline.runtime.strategy.initial import SavedBuffers
from paceline.runtime.strategy.local import local_of

if TYPE_CHECKING:
    from paceline.runtime.step import Outcome

ELEMENT_WISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    AdamW8bit,
)
"""Optimizers that update a shard from that shard alone. Adafactor sums over rows and columns, and
Muon over whole matrices: they need the other shards, and every step more than a gradient."""

NO_SHADOW = "R027"
"""Code of what is said when shadows are wanted and cannot be."""

_ALIGN = 64
"""Tensors in a message begin at multiples of it: a cache line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What is needed to run another rank's optimizer, but for the numbers."""

    kind: type[torch.optim.Optimizer]

    groups: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]
    """Each group's options, and the names of its parameters."""

    entries: tuple[Entry, ...]
    """Parameters, saved buffers and optimizer state, as `LiveState` has them."""

    fresh: tuple[Entry, ...]
    """State that parameters without any will begin with, of optimizers whose `empty_state` needs to
    know the whole parameter."""

    device: str
    """Kind of device that the parameters are on."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parameters that are trained, in the order of the groups."""
        return tuple(name for _, names in self.groups for name in names)

    def parameter(self, name: str) -> Entry:
        """As the owner has it."""
        return next(each for each in self.entries if each.name == MODEL + name)

    @property
    def buffers(self) -> tuple[Entry, ...]:
        return tuple(each for each in self.entries if each.name.startswith(BUFFERS))

    @property
    def sent(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """What comes with every step: learning rates, gradients, buffers, and for each parameter
        whether it has a gradient."""
        entries = {each.name: each for each in self.entries}
        gradients = [entries[MODEL + name] for name in self.names]
        return (
            (torch.float64, (len(self.groups),)),
            *((getattr(torch, each.dtype), each.shape) for each in (*gradients, *self.buffers)),
            (torch.uint8, (len(gradients),)),
        )


def why_not(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Why no shadow of a state can be kept, or None."""
    kind = type(optimizer)
    if kind not in ELEMENT_WISE:
        return f"{kind.__name__} is not known to update each number by itself"
    names = {id(parameter) for parameter in named_parameters(model).values()}
    if any(id(each) not in names for group in optimizer.param_groups for each in group["params"]):
        return "the optimizer has parameters that are not the model's"
    if any(not isinstance(value, Stored) for value in model_state(model).values()):
        return "the model saves a state that is no tensor"
    return None


def draw(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Blueprint, list[Tensor]]:
    """The blueprint of a live state, and its numbers: `entries`, then `fresh`."""
    live = LiveState(model, optimizer)
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "lr")}
        if "foreach" in options and options["foreach"] is None and not options.get("fused"):
            # What torch chooses for the owner's tensors, and not for plain ones.
            _, options["foreach"] = _default_to_fused_or_foreach(
                group["params"], False, use_fused=False
            )
        groups.append((options, tuple(names[id(each)] for each in group["params"])))
    fresh = list(_fresh(model, optimizer))
    parameters = [local_of(each.detach()) for each in model.parameters()]
    blueprint = Blueprint(
        kind=type(optimizer),
        groups=tuple(groups),
        entries=tuple(live.entries()),
        fresh=tuple(entry for entry, _ in fresh),
        device=parameters[0].device.type if parameters else "cpu",
    )
    return blueprint, [tensor for _, tensor in live.tensors()] + [tensor for _, tensor in fresh]


def _fresh(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Entry, Tensor]]:
    if not hasattr(optimizer, "empty_state"):
        return
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in named_parameters(model).items():
        if id(parameter) not in trained or optimizer.state.get(parameter):
            continue
        for key, value in sorted(optimizer.empty_state(parameter).items()):
            yield entry_of(f"{OPTIMIZER}{name}/{key}", value), local_of(value.detach())


class Outgoing:
    """What one rank sends of each step: its reduced gradients and saved buffers."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, blueprint: Blueprint
    ) -> None:
        parameters = named_parameters(model)
        self._optimizer = optimizer
        self._parameters = [parameters[name] for name in blueprint.names]
        self._buffers = SavedBuffers(model)
        self.flat = torch.empty(
            num_bytes(blueprint.sent), dtype=torch.uint8, device=blueprint.device
        )
        """The message."""
        self._rates, *self._numbers, self._flags = views(self.flat, blueprint.sent)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy this step's in."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._rates.copy_(torch.tensor(rates, dtype=torch.float64))
        gradients = [parameter.grad for parameter in self._parameters]
        self._flags.copy_(torch.tensor([each is not None for each in gradients], dtype=torch.uint8))
        numbers = [None if each is None else local_of(each) for each in gradients]
        for room, value in zip(self._numbers, [*numbers, *self._buffers.tensors()], strict=True):
            if value is not None:
                room.copy_(value)


class Shadow:
    """One rank's parameters, saved buffers and optimizer state, kept by another."""

    def __init__(self, blueprint: Blueprint, numbers: Sequence[Tensor], step: int) -> None:
        """
        Args:
            blueprint: The owner's.
            numbers: As `draw` gave them; taken over.
            step: That they are of.
        """
        self.step = step
        self.next_step: int | None = None
        """The step whose gradients `room` has, when they have come."""

        self.room = torch.empty(
            num_bytes(blueprint.sent), dtype=torch.uint8, device=blueprint.device
        )
        """Where the next step's message goes."""

        self._blueprint = blueprint
        self._values = dict(zip([e.name for e in blueprint.entries], numbers, strict=False))
        self._parameters = {
            name: nn.Parameter(self._values[MODEL + name]) for name in blueprint.names
        }
        self._optimizer = _optimizer(blueprint, self._parameters)
        self._wholes = {each.name: each.whole for each in (*blueprint.entries, *blueprint.fresh)}
        state = self._optimizer.state
        for entry, value in zip((*blueprint.entries, *blueprint.fresh), numbers, strict=True):
            if entry.name.startswith(OPTIMIZER):
                name, _, key = entry.name.removeprefix(OPTIMIZER).rpartition("/")
                state[self._parameters[name]][key] = value
        self._untouched = {
            each.name.removeprefix(OPTIMIZER).rpartition("/")[0] for each in blueprint.fresh
        }

    @property
    def copy(self) -> Copy:
        """What it is, as other ranks are told."""
        return Copy(step=self.step, next_step=self.next_step)

    @torch.no_grad()
    def take(self, outcome: Outcome) -> None:
        """Do what the owner does in a step, with the gradients that have come."""
        assert outcome.step == self.next_step
        self.next_step = None
        if outcome.refused is None:
            self._update(outcome.factor)
        self.step = outcome.step

    def _update(self, factor: float) -> None:
        rates, *numbers, flags = views(self.room, self._blueprint.sent)
        for group, rate in zip(self._optimizer.param_groups, rates.tolist(), strict=True):
            group["lr"] = rate
        has_gradient = [flag > 0 for flag in flags.tolist()]
        gradients, buffers = numbers[: len(has_gradient)], numbers[len(has_gradient) :]
        held = [each for each, has in zip(gradients, has_gradient, strict=True) if has]
        if factor != 1.0 and held:
            torch._foreach_mul_(held, factor)
        named = zip(self._parameters.items(), gradients, has_gradient, strict=True)
        for (name, parameter), gradient, has in named:
            parameter.grad = gradient if has else None
            if has:
                self._untouched.discard(name)
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        for entry, value in zip(self._blueprint.buffers, buffers, strict=True):
            self._values[entry.name].copy_(value)

    def tensors(self) -> Iterator[tuple[Entry, Tensor]]:
        """All of it, as the owner's `LiveState` would give it now."""
        for entry in self._blueprint.entries:
            if not entry.name.startswith(OPTIMIZER):
                yield entry, self._values[entry.name]
        for entry in self._blueprint.entries:
            name = entry.name.removeprefix(MODEL)
            if entry.name.startswith(OPTIMIZER) or name not in self._parameters:
                continue
            if name in self._untouched:
                continue
            state: Mapping[str, Any] = self._optimizer.state.get(self._parameters[name], {})
            for key in sorted(state):
                value = state[key]
                if isinstance(value, Tensor):
                    full = f"{OPTIMIZER}{name}/{key}"
                    whole = self._whole(full, value, entry)
                    yield msgspec.structs.replace(entry_of(full, value), whole=whole), value

    def _whole(self, name: str, value: Tensor, parameter: Entry) -> tuple[int, ...] | None:
        """Of the tensor that a state is a part of on its owner: state that came to be here has the
        shape of its parameter, or is a number."""
        if name in self._wholes:
            return self._wholes[name]
        return parameter.whole if value.dim() > 0 and value.shape == parameter.shape else None


def _optimizer(
    blueprint: Blueprint, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    groups = [
        {**options, "params": [parameters[name] for name in names]}
        for options, names in blueprint.groups
    ]
    asked = inspect.signature(blueprint.kind).parameters
    common = {key: value for key, value in blueprint.groups[0][0].items() if key in asked}
    made: torch.optim.Optimizer = blueprint.kind(groups, **(common | {"lr": 0.0}))
    return made


def views(flat: Tensor, parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[Tensor]:
    """The tensors in a message, one after the other."""
    start = 0
    for dtype, shape in parts:
        size = prod(shape) * dtype.itemsize
        yield flat[start : start + size].view(dtype).view(shape)
        start += _rounded(size)


def num_bytes(parts: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """Of a message with these tensors."""
    return sum(_rounded(prod(shape) * dtype.itemsize) for dtype, shape in parts)


def parts_of(entries: Sequence[Entry]) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """Types and shapes of tensors."""
    return tuple((getattr(torch, each.dtype), each.shape) for each in entries)


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
