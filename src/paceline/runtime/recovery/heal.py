"""Bring every rank to the newest step: its own state, or a copy of a rank's that holds the same.

Which step that is, and who gets it from whom, is `newest.py`'s to say. What a rank lacks it gets
from a replica whole, bit by bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime.optimizer.sharded import like
from paceline.runtime.recovery.live import LiveState
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
                key: _laid_out(value, parameter) if isinstance(value, DTensor) else value
                for key, value in state.items()
            }


def send(
    to: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> None:
    """Give a rank everything that this one has."""
    state = LiveState(model, optimizer)
    told = [dict(facts), _others(model), state.entries(), _numbers(model, optimizer)]
    dist.send_object_list(told, dst=to)
    send_tensors(to, [tensor for _, tensor in state.tensors()])


@torch.no_grad()
def receive(source: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Take everything that a rank has; returns its facts, which count once the device is settled.
    Where each tensor lies comes first, with the entries."""
    told: list[Any] = [None] * 4
    dist.recv_object_list(told, src=source)
    facts, others, entries, numbers = told
    state = LiveState(model, optimizer)
    state.make_room(entries)
    receive_tensors(source, [tensor for _, tensor in state.tensors()])
    set_other_model_state(model, others)
    for name, parameter in named_parameters(model).items():
        optimizer.state[parameter].update(numbers.get(name, {}))
    return dict(facts)


def send_tensors(to: int, tensors: Sequence[Tensor]) -> None:
    """Send tensors, which may lie on the host or on this rank's device."""
    for chunk in _chunks(tensors):
        _pass(dist.isend, torch.cat([as_bytes(each) for each in chunk]), to)


@torch.no_grad()
def receive_tensors(source: int, tensors: Sequence[Tensor]) -> None:
    """Receive into tensors of the same shapes, types and kinds of device, in the same order. What
    comes to a device has come once that is settled."""
    for chunk in _chunks(tensors):
        sizes = [each.nbytes for each in chunk]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=chunk[0].device)
        _pass(dist.irecv, flat, source)
        for each, part in zip(chunk, torch.split(flat, sizes), strict=True):
            # A copy, as numbers of one size need not begin where those of another one end.
            each.copy_(part.clone().view(each.dtype).view(each.shape))


def _pass(op: Callable[..., dist.Work | None], flat: Tensor, peer: int) -> None:
    """One message, over the group of its device: a batch is one operation of NCCL's, which makes no
    communicator for the pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(op, flat, peer)]):
        work.wait()


def as_bytes(tensor: Tensor) -> Tensor:
    """No transport knows every type."""
    return tensor.reshape(-1).view(torch.uint8)


def _numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    numbers = {
        name: {
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        }
        for name, parameter in named_parameters(model).items()
    }
    return {name: values for name, values in numbers.items() if values}


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


def _laid_out(value: DTensor, parameter: nn.Parameter) -> Tensor:
    local = local_part(value)[1]
    return like(parameter.data, local, tuple(value.shape))


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """First those on the host, then those on the device: a message lies on one, and goes over its
    transport."""
    for is_host in (True, False):
        chunk: list[Tensor] = []
        size = 0
        for tensor in tensors:
            if (tensor.device.type == "cpu") != is_host or not tensor.numel():
                continue
            if chunk and size + tensor.nbytes > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += tensor.nbytes
        if chunk:
            yield chunk
