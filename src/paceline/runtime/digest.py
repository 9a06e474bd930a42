"""One SHA-256 of everything that training changes: the oracle that a recovery was exact."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime.checkpoint._agree import gather
from paceline.runtime.state import Stored, named_state


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256, 64 hex digits, of all parameters, saved buffers and optimizer state.

    Each tensor's name, shape, type and SHA-256 is a line; the digest is of the lines, sorted. The
    same values give the same digest in every layout, on any number of ranks, and on every rank. A
    rank whose copy of something differs from the other ranks' has another digest than they. What
    only one rank's part of a parameter has (`state.optimizer_name`) makes the digest the layout's
    own. Learning rates and other options of the optimizer are not in it.

    Collective over all ranks. A tensor that is split over ranks is hashed by one of them. Memory:
    one whole tensor at a time.
    """
    everywhere, shared = _lines(named_state(model, optimizer))
    lines = dict(everywhere)
    if dist.is_initialized():
        group = dist.group.WORLD
        seals = gather(seal_of(everywhere), group)
        # One of the ranks that have the same lines tells them.
        speaks = seals.index(seal_of(everywhere)) == dist.get_rank(group)
        told = gather({**(everywhere if speaks else {}), **shared}, group)
        lines = {name: line for part in reversed(told) for name, line in part.items()}
    return seal_of(lines | everywhere | shared)


def _lines(state: Mapping[str, Stored | Any]) -> tuple[dict[str, str], dict[str, str]]:
    """What this rank has whole, and what it hashed of the tensors that are split over ranks."""
    everywhere: dict[str, str] = {}
    shared: dict[str, str] = {}
    for name, value in sorted(state.items()):
        if not isinstance(value, Stored):
            everywhere[name] = repr(value)
            continue
        first = value.pieces[0][1]
        whole = _whole(value)  # collective: every rank of the mesh takes part
        if not isinstance(first, DTensor):
            everywhere[name] = line_of(whole)
        elif _is_hashed_here(name, first):
            shared[name] = line_of(whole)
        del whole
    return everywhere, shared


def _is_hashed_here(name: str, tensor: DTensor) -> bool:
    """One of the ranks that split a copy of the tensor hashes it, of every copy another one."""
    mesh, turn = tensor.device_mesh, zlib.crc32(name.encode())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank has no part of a tensor on a mesh it is not in"
    for index, size, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
        if not placement.is_replicate():
            turn, mine = divmod(turn, size)
            if mine != index:
                return False
    return True


@torch.no_grad()
def _whole(stored: Stored) -> Tensor:
    wholes = [
        piece.full_tensor() if isinstance(piece, DTensor) else piece for _, piece in stored.pieces
    ]
    if len(wholes) == 1:
        return wholes[0].detach()
    whole = wholes[0].new_empty(stored.size)
    for (offset, _), piece in zip(stored.pieces, wholes, strict=True):
        box = tuple(
            slice(start, start + size) for start, size in zip(offset, piece.shape, strict=True)
        )
        whole[box] = piece
    return whole


def line_of(tensor: Tensor) -> str:
    """What the digest has of a whole tensor, besides its name."""
    plain = tensor.cpu().contiguous()
    values = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().data).hexdigest()
    return f"{list(plain.shape)} {plain.dtype} {values}"


def seal_of(lines: Mapping[str, str]) -> str:
    """The digest of a state from its lines by name; of another value the line is its `repr`."""
    text = "".join(f"{name} {line}\n" for name, line in sorted(lines.items()))
    return hashlib.sha256(text.encode()).hexdigest()
