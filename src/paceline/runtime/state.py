"""The state of training by name: parameters, saved buffers and optimizer state, layout-free names.

One flat dict serves checkpoints and digests alike. Names and shapes are the plain, whole model's,
in every layout: what DDP, `torch.compile` and activation checkpointing put in front is taken off, a
pipeline stage has its part of the names, a linear that tensor parallelism took apart is one again,
and a tied parameter is there once. A rank may hold a tensor whole, a box of it, or several.

Optimizer state of the parameter's shape lies where the parameter lies. An optimizer whose state has
another shape is asked for `empty_state(parameter) -> dict[str, Tensor]` when a checkpoint is read.

Leaves out: the optimizer's options (learning rate, weight decay ...), which follow from the job
and its schedule, and random generators, which are seeded afresh each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import RunError
from paceline.runtime._torch_private import local_shape_and_offset
from paceline.runtime.strategy.adapter.linear import (
    FROZEN_DIGEST,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    frozen_parameters,
    has_adapter,
)
from paceline.runtime.strategy.local import unwrapped
from paceline.runtime.strategy.product import is_transposed
from paceline.runtime.strategy.tensor.fused import SplitLinear

MODEL, OPTIMIZER, DATA = "model/", "optimizer/", "data/"
"""What the saved names of each kind begin with; of the data, states of streams (`stream.py`)."""

FROZEN_STATE = MODEL + "frozen"
"""What stands for all that adapters are trained beside: what its numbers follow from."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor of the state, as this rank has it."""

    size: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], Tensor], ...]
    """Where each begins in the whole, and the live tensor: all of it, or a DTensor."""

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0][1].dtype


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor that lies on this rank."""

    offset: tuple[int, ...]
    """Where it begins in the whole."""

    tensor: Tensor
    """Its values: the live memory, a plain tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter of this rank's modules is in the plain model."""

    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    """Where this one begins in that parameter: not at 0 for a part of a linear that was taken
    apart."""


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Stored | Any]:
    """Every tensor and other saved value that this rank has a part of, the live ones and no copies.

    `model/blocks.0.ffn.up.weight`, `optimizer/blocks.0.ffn.up.weight/exp_avg`.
    """
    state = dict(model_state(model))
    places = parameter_places(model)
    for name, parameter in named_parameters(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                _put(state, *_optimizer_entry(places[name], name, parameter, key, value))
    return state


def model_state(model: nn.Module) -> dict[str, Stored | Any]:
    """The part of `named_state` that is the model's own."""
    places = parameter_places(model)
    state: dict[str, Stored | Any] = {}
    held = unwrapped(model).state_dict(keep_vars=True)
    if hasattr(unwrapped(model), FROZEN_DIGEST):
        state[FROZEN_STATE] = getattr(unwrapped(model), FROZEN_DIGEST)
    seen = {id(parameter) for parameter in frozen_parameters(model)}
    for raw, value in held.items():
        name = _plain(raw)
        if not isinstance(value, Tensor):  # extra state: of two modules it may be one object
            state[MODEL + name] = value
            continue
        if id(value) in seen:  # a tied parameter, under its second name
            continue
        seen.add(id(value))
        if name in places:
            place = places[name]
            _put(state, MODEL + place.name, _stored(place, value))
        else:
            state[MODEL + name] = whole_of(value)
    return state


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are saved: all of `named_parameters` but what adapters are trained beside."""
    frozen = {id(parameter) for parameter in frozen_parameters(model)}
    named = named_parameters(model).items()
    return {name: parameter for name, parameter in named if id(parameter) not in frozen}


def whole_of(tensor: Tensor) -> Stored:
    """A tensor that is no part of another."""
    return Stored(size=tuple(tensor.shape), pieces=(((0,) * tensor.dim(), tensor),))


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter of this rank once, under the name its module has: parts stay apart."""
    bare = unwrapped(model)
    return {_plain(name): parameter for name, parameter in bare.named_parameters()}


def parameter_places(model: nn.Module) -> dict[str, Place]:
    """Where each of `named_parameters` is in the plain model."""
    parameters = named_parameters(model)
    places = {
        name: Place(name=name, size=tuple(each.shape), offset=(0,) * each.dim())
        for name, each in parameters.items()
    }
    for raw, module in unwrapped(model).named_modules():
        if isinstance(module, SplitLinear):
            places |= _places_of_parts(_plain(raw), module)
    return places


def _places_of_parts(whole: str, apart: SplitLinear) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for name, part in apart.named_children():
        if has_adapter(part):  # one matrix, the same in all parts
            shape = tuple(getattr(part, LORA_A).shape)
            place = Place(name=f"{whole}.{LORA_A}", size=shape, offset=(0, 0))
            places[f"{whole}.{name}.{LORA_A}"] = place
    for kind in ("weight", "bias", LORA_B, MAGNITUDE):
        parts = {name: getattr(part, kind, None) for name, part in apart.named_children()}
        sizes = {name: list(part.shape) for name, part in parts.items() if part is not None}
        if not sizes:
            continue
        dim = 1 if kind == "weight" and any(map(is_transposed, apart.children())) else 0
        size = next(iter(sizes.values())).copy()
        size[dim] = sum(each[dim] for each in sizes.values())
        start = 0
        for name, each in sizes.items():
            offset = [0] * len(size)
            offset[dim] = start
            start += each[dim]
            places[f"{whole}.{name}.{kind}"] = Place(
                name=f"{whole}.{kind}", size=tuple(size), offset=tuple(offset)
            )
    return places


def boxes_of(stored: Stored) -> list[Box]:
    """What lies on this rank, in plain tensors that share memory with the live ones."""
    boxes = []
    for start, tensor in stored.pieces:
        offset, local = local_part(tensor)
        if local.numel() > 0 or 0 in stored.size:
            shifted = tuple(a + b for a, b in zip(start, offset, strict=True))
            boxes.append(Box(shifted, local))
    return boxes


def local_part(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Where this rank's part of a tensor begins, and the part."""
    if not isinstance(tensor, DTensor):  # apart, as switching gradients off costs more than this
        return (0,) * tensor.dim(), tensor.detach()
    return _local_part(tensor)


@torch.no_grad()
def _local_part(tensor: DTensor) -> tuple[tuple[int, ...], Tensor]:
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = local_shape_and_offset(tensor.shape, mesh, placements)
    local = tensor.to_local()
    if local.numel() > 0 and tuple(local.shape) != tuple(shape):
        raise ValueError(
            f"a part of shape {list(local.shape)} where {placements} of {list(tensor.shape)} "
            f"should have {list(shape)}"
        )
    return tuple(offset), local


def is_split(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of a tensor."""
    is_whole = not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements)
    return not is_whole


def optimizer_name(place: Place, raw: str, parameter: Tensor, key: str, value: Any) -> str:
    """Name of one piece of a parameter's optimizer state.

    A plain tensor beside a parameter that is split belongs to this rank's part of it alone and can
    be read back by nobody else: its name says which part, `.../codes@0,0+16,64`.
    """
    if isinstance(value, Tensor) and value.dim() > 0 and not isinstance(value, DTensor):
        if is_split(parameter):
            return f"{OPTIMIZER}{raw}/{key}{part_suffix(parameter)}"
    elif isinstance(value, DTensor) and value.dim() > 0 and value.shape != parameter.shape:
        return f"{OPTIMIZER}{raw}/{key}"
    is_own = isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape
    return f"{OPTIMIZER}{raw if is_own else place.name}/{key}"


def part_suffix(parameter: Tensor) -> str:
    """Says which part of a parameter this rank has: `@offset+shape`."""
    offset, local = local_part(parameter)
    return f"@{','.join(map(str, offset))}+{','.join(map(str, local.shape))}"


def split_optimizer_name(name: str) -> tuple[str, str, str]:
    """Parameter, key and part of an optimizer state's name; the part is empty for most."""
    parameter_name, _, rest = name.removeprefix(OPTIMIZER).rpartition("/")
    key, at, part = rest.partition("@")
    return parameter_name, key, at + part


def set_other_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Hand values that are no tensors (a module's extra state) back to the model.

    Raises:
        RunError: `R065`, the state is of adapters beside other frozen weights than the model's.
    """
    bare = unwrapped(model)
    if FROZEN_STATE in state and state[FROZEN_STATE] != getattr(bare, FROZEN_DIGEST, None):
        raise _other_weights(state[FROZEN_STATE], getattr(bare, FROZEN_DIGEST, None))
    values = {
        raw: state[MODEL + _plain(raw)]
        for raw, value in bare.state_dict().items()
        if not isinstance(value, Tensor)
    }
    if values:
        bare.load_state_dict(values, strict=False)


def _other_weights(saved: Any, here: Any) -> RunError:
    return RunError.of(
        code="R065",
        what=f"the adapters were trained beside other frozen weights ({str(saved)[:12]}) than the "
        f"model has here ({str(here)[:12]}): another file, torch, processor or seed",
        where="train.adapter",
        fix="give the weights and versions that the run began with",
    )


def _optimizer_entry(
    place: Place, raw: str, parameter: nn.Parameter, key: str, value: Any
) -> tuple[str, Stored | Any]:
    name = optimizer_name(place, raw, parameter, key, value)
    if not isinstance(value, Tensor):
        return name, value
    return name, _stored(place, value) if value.shape == parameter.shape else whole_of(value)


def _stored(place: Place, value: Tensor) -> Stored:
    return Stored(size=place.size, pieces=((place.offset, value),))


def _put(state: dict[str, Stored | Any], name: str, value: Stored | Any) -> None:
    """Add a value; parts of one tensor come together, a number that all parts have is one."""
    old = state.get(name)
    if isinstance(old, Stored) and isinstance(value, Stored) and value.size:
        value = Stored(size=old.size, pieces=(*old.pieces, *value.pieces))
    elif old is not None:
        return
    state[name] = value


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
