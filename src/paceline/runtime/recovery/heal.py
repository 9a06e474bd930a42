"""Bring every rank to the newest step: its own state, or a copy of a rank's that holds the same.

The newest step that any rank has applied is the one to go on from: all had voted for it, so a rank
that has not applied it is only late. It and the ranks with new workers get everything from one of
their replicas, bit by bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime.state import (
    Stored,
    boxes_of,
    local_part,
    model_state,
    named_parameters,
    set_other_model_state,
)

_CHUNK_BYTES = 64 << 20
"""Sent at once: large enough that latency does not count, small beside a model. A guess."""


@dataclass(frozen=True, slots=True)
class Route:
    """A rank that needs the state, and one that has it."""

    to: int
    source: int


def find_routes(applied: Sequence[int], replicas: Sequence[Sequence[int]]) -> list[Route] | None:
    """Who gets the newest state from whom, or None when it is not all there.

    Args:
        applied: By rank, the last step that its state has; -1 for none.
        replicas: Groups of ranks that hold the same; every rank is in one.

    >>> find_routes([7, -1, 6, 7], [(0, 1), (2, 3)])
    [Route(to=1, source=0), Route(to=2, source=3)]
    >>> find_routes([7, 7, -1, -1], [(0, 1), (2, 3)]) is None
    True
    """
    newest = max(applied)
    routes = []
    for group in replicas:
        sources = [rank for rank in group if applied[rank] == newest]
        if not sources:
            return None
        needy = [rank for rank in group if applied[rank] != newest]
        routes += [Route(rank, sources[n % len(sources)]) for n, rank in enumerate(needy)]
    return routes


@torch.no_grad()
def adopt(
    old: tuple[nn.Module, torch.optim.Optimizer], new: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    """Move the state of a model and its optimizer into ones that were built anew in the same
    layout. The optimizer's tensors are moved, the model's copied."""
    if old[0] is not new[0]:
        for mine, theirs in zip(_tensors(new[0]), _tensors(old[0]), strict=True):
            mine.copy_(theirs)
        set_other_model_state(new[0], _others(old[0]))
    before = named_parameters(old[0])
    for name, parameter in named_parameters(new[0]).items():
        state = old[1].state.get(before[name], {})
        new[1].state.pop(parameter, None)
        if state:
            new[1].state[parameter] = {
                key: _laid_out(local_part(value)[1], parameter)
                if isinstance(value, DTensor)
                else value
                for key, value in state.items()
            }


def send(
    to: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> None:
    """Give a rank everything that this one has."""
    entries, tensors = _optimizer_entries(model, optimizer)
    dist.send_object_list([dict(facts), _others(model), entries], dst=to)
    for chunk in _chunks([*_tensors(model), *tensors]):
        dist.send(torch.cat([each.reshape(-1).view(torch.uint8) for each in chunk]), dst=to)


@torch.no_grad()
def receive(
    source: int, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[str, Any]:
    """Take everything that a rank has; returns its facts."""
    received: list[Any] = [None, None, None]
    dist.recv_object_list(received, src=source)
    facts, others, entries = received
    parameters = named_parameters(model)
    tensors = list(_tensors(model))
    optimizer.state.clear()
    for name, entry in entries.items():
        state: dict[str, Any] = {}
        for key, value in entry.items():
            if isinstance(value, _Missing):
                room = torch.empty(value.shape, dtype=value.dtype, device=value.device)
                tensors.append(room)
                is_part = value.is_distributed
                state[key] = _laid_out(room, parameters[name]) if is_part else room
            else:
                state[key] = value
        optimizer.state[parameters[name]] = state
    for chunk in _chunks(tensors):
        sizes = [each.nbytes for each in chunk]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.recv(flat, src=source)
        for each, part in zip(chunk, torch.split(flat, sizes), strict=True):
            each.copy_(part.view(each.dtype).view(each.shape))
    set_other_model_state(model, others)
    return dict(facts)


@dataclass(frozen=True, slots=True)
class _Missing:
    """A tensor of the optimizer's that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    is_distributed: bool


def _optimizer_entries(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, dict[str, Any]], list[Tensor]]:
    entries: dict[str, dict[str, Any]] = {}
    tensors: list[Tensor] = []
    for name, parameter in named_parameters(model).items():
        entry: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            entry[key] = value
            if isinstance(value, Tensor):
                local = local_part(value)[1]
                entry[key] = _Missing(
                    tuple(local.shape), local.dtype, local.device.type, isinstance(value, DTensor)
                )
                tensors.append(local)
        if entry:
            entries[name] = entry
    return entries, tensors


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """This rank's part of every parameter and saved buffer, live, in the same order everywhere."""
    for _, value in sorted(model_state(model).items()):
        if isinstance(value, Stored):
            for box in boxes_of(value):
                yield box.tensor


def _others(model: nn.Module) -> dict[str, Any]:
    return {
        name: value for name, value in model_state(model).items() if not isinstance(value, Stored)
    }


def _laid_out(local: Tensor, parameter: nn.Parameter) -> Tensor:
    """A part of something of a parameter's shape, laid out as the parameter is."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return local
    return DTensor.from_local(
        local,
        data.device_mesh,
        data.placements,
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and size + tensor.nbytes > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk
