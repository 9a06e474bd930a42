"""Where each saved value goes: the live tensors, and new memory for optimizer state.

The optimizer may be new and hold no state yet. Its state is made as the checkpoint has it, laid out
like the parameter it belongs to, with no step taken to make torch create it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from paceline.runtime.checkpoint._host_memory import Room
from paceline.runtime.checkpoint._save_plan import Part
from paceline.runtime.optimizer.sharded import part_of
from paceline.runtime.state import (
    MODEL,
    OPTIMIZER,
    Place,
    Stored,
    boxes_of,
    is_split,
    local_part,
    model_state,
    named_parameters,
    parameter_places,
    part_suffix,
    set_other_model_state,
    split_optimizer_name,
    whole_of,
)

Saved = Mapping[str, Any]
"""A checkpoint's table of contents: name -> `TensorStorageMetadata`, or of another value."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is read, and what becomes of it."""

    state: dict[str, Part | Any]
    """By saved name: the memory to read into; None for a value that is no tensor."""

    optimizer: dict[str, dict[str, "_Source"]]
    """Parameter of this rank -> key -> what it will be."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One piece of a parameter's optimizer state."""

    name: str
    tensor: Tensor | None
    """What is read into; None for a value that is no tensor."""


def make_target(saved: Saved, model: nn.Module, optimizer: torch.optim.Optimizer) -> Target:
    """Everything that this rank takes from a checkpoint.

    Raises:
        ValueError: The model is another one, or optimizer state cannot be cut as it is needed.
    """
    state = model_state(model)
    _check_same_model(state, saved)
    places, parameters = parameter_places(model), named_parameters(model)
    of_parameter = _listed(saved)
    sources: dict[str, dict[str, _Source]] = {}
    room = Room()
    for raw, place in places.items():
        names = [n for owner in dict.fromkeys((place.name, raw)) for n in of_parameter[owner]]
        sources[raw] = {}
        live = _live(optimizer, parameters[raw])
        for name in _own_names(names, raw, parameters[raw]):
            key = split_optimizer_name(name)[1]
            tensor = _memory_for(room, name, saved[name], place, parameters[raw], live.get(key))
            sources[raw][key] = _add(state, name, tensor, place, parameters[raw])
    return Target(
        {
            name: Part(value.size, tuple(boxes_of(value))) if isinstance(value, Stored) else None
            for name, value in state.items()
        },
        sources,
    )


def take_over(target: Target, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer exactly the state that was loaded, and the model what is no tensor."""
    set_other_model_state(model, target.state)
    options = {p: group for group in optimizer.param_groups for p in group["params"]}
    for raw, parameter in named_parameters(model).items():
        group = options.get(parameter, {})
        # A count of steps lives on the device for the optimizers that read it there.
        on_device = bool(group.get("fused") or group.get("capturable"))
        loaded: dict[str, Any] = {}
        for key, source in target.optimizer[raw].items():
            value = target.state[source.name] if source.tensor is None else source.tensor
            if isinstance(value, Tensor) and value.dim() == 0:
                value = value.clone()  # the parts of one linear each count for themselves
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and on_device:
                value = value.to(parameter.device)
            loaded[key] = value
        optimizer.state.pop(parameter, None)
        if loaded:
            optimizer.state[parameter] = loaded


def _check_same_model(here: Mapping[str, Stored | Any], saved: Saved) -> None:
    for name, value in sorted(here.items()):
        if name not in saved:
            raise ValueError(f"the model has {name.removeprefix(MODEL)}, the checkpoint has not")
        facts = saved[name]
        if isinstance(facts, TensorStorageMetadata) and tuple(facts.size) != value.size:
            raise ValueError(
                f"{name.removeprefix(MODEL)} is {list(value.size)} in the model and "
                f"{list(facts.size)} in the checkpoint"
            )


def _listed(saved: Saved) -> defaultdict[str, list[str]]:
    listed: defaultdict[str, list[str]] = defaultdict(list)
    for name in saved:
        if name.startswith(OPTIMIZER):
            listed[split_optimizer_name(name)[0]].append(name)
    return listed


def _own_names(names: list[str], raw: str, parameter: nn.Parameter) -> list[str]:
    own_part = part_suffix(parameter) if is_split(parameter) else ""
    own, foreign = [], {}
    for name in names:
        _, key, part = split_optimizer_name(name)
        if part in ("", own_part):
            own.append(name)
        else:
            foreign[key] = part
    lacking = foreign.keys() - {split_optimizer_name(name)[1] for name in own}
    for key in sorted(lacking):
        here = own_part.partition("+")[2] or ",".join(map(str, parameter.shape))
        raise ValueError(
            f"{key} of {raw} was saved for parts of the parameter as they lay then "
            f"({foreign[key].partition('+')[2]} of it), and cannot be cut for {here}: go on in the "
            "layout it was saved in, or with another optimizer"
        )
    return own


def _live(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    """What the optimizer holds, or would hold where it can say so."""
    make: Callable[[Tensor], Mapping[str, Any]] | None = getattr(optimizer, "empty_state", None)
    held = optimizer.state.get(parameter)
    return held or (make(parameter) if make is not None else {})


def _memory_for(
    room: Room, name: str, facts: Any, place: Place, parameter: nn.Parameter, live: Any
) -> Tensor | None:
    """Memory for one saved value, laid out as this rank needs it; None for no tensor."""
    if not isinstance(facts, TensorStorageMetadata):
        return None
    size, dtype = tuple(facts.size), facts.properties.dtype
    owner, key, part = split_optimizer_name(name)
    if not size:
        return torch.zeros((), dtype=dtype)
    is_of_whole = owner == place.name and place.size != tuple(parameter.shape)
    told = "it is of several matrices that are apart here"
    if isinstance(live, Tensor):
        if _fits(live, size, place, parameter):
            return live.detach() if live.dtype == dtype else torch.empty_like(live, dtype=dtype)
        told = f"{list(live.shape)} is needed here"
    elif size == place.size and not part:
        return room.like(parameter.detach(), dtype)
    elif not is_of_whole:
        whole = torch.empty(size, dtype=dtype, device=local_part(parameter)[1].device)
        if part or not is_split(parameter):
            return whole
        if len(size) == parameter.dim():
            return part_of(whole, parameter)
        told = "nothing says how"
    raise ValueError(
        f"{key} of {owner} was saved as {list(size)} for a parameter of {list(place.size)}, and "
        f"cannot be laid out: {told}. Go on in the layout it was saved in"
    )


def _fits(live: Tensor, size: tuple[int, ...], place: Place, parameter: nn.Parameter) -> bool:
    if live.shape == parameter.shape and size == place.size:
        return isinstance(live, DTensor) or not is_split(parameter)
    return tuple(live.shape) == size


def _add(
    state: dict[str, Stored | Any],
    name: str,
    tensor: Tensor | None,
    place: Place,
    parameter: nn.Parameter,
) -> _Source:
    """Have it read: parts of a linear that was taken apart come together again."""
    old = state.get(name)
    if tensor is None:
        state[name] = None
    elif tensor.shape == parameter.shape and tensor.dim() > 0:
        pieces = old.pieces if isinstance(old, Stored) else ()
        state[name] = Stored(size=place.size, pieces=(*pieces, (place.offset, tensor)))
    elif isinstance(old, Stored):  # a number that all parts have
        tensor = old.pieces[0][1]
    else:
        state[name] = whole_of(tensor)
    return _Source(name, tensor)
