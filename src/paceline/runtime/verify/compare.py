"""How the tensors of a layout differ from a single device's, and what of them a rank holds."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.record.verification import Bytes, Deviation, Piece
from paceline.runtime.state import named_parameters
from paceline.runtime.strategy.local import local_of

_WORTH_A_LOOK = 1e-10
"""Share from which on a difference is looked at more closely: 1e6 times the unit of float64."""

_LIKE = 1e-6
"""Share below which two tensors count as the same one, where neither has its last bits right."""


def deviation(
    found: Tensor, truth: Tensor, shares: Mapping[int, Tensor] | None = None
) -> Deviation:
    """How one tensor differs from a single device's.

    Args:
        found: Whole, or a DTensor, which is gathered: collective then.
        shares: What the samples of each data rank alone would give; with it, a tensor that is off
            is compared with multiples of each of them and of the truth.
    """
    whole = whole_of(found).double().reshape(-1)
    right = truth.to(whole.device).reshape(-1)
    difference = whole - right
    squares, of = float(difference.square().sum()), float(right.square().sum())
    ratio = beside = like = None
    is_off = not squares <= _WORTH_A_LOOK**2 * of
    if is_off and shares is not None and of > 0:
        ratio = float(whole @ right) / of
        beside = _share(whole - ratio * right, whole)
        near = {rank: _beside(whole, _flat(share, whole)) for rank, share in shares.items()}
        best = min(near, key=lambda rank: near[rank], default=None)
        like = best if best is not None and near[best] < _LIKE else None
    return Deviation(
        squares=squares,
        of=of,
        count=whole.numel(),
        largest=float(difference.abs().max()) if whole.numel() else 0.0,
        most=float(right.abs().max()) if whole.numel() else 0.0,
        ratio=ratio,
        beside_ratio=beside,
        like_share=like,
    )


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like.device, like.dtype).reshape(-1)


def _beside(whole: Tensor, other: Tensor) -> float:
    """What no multiple of the other explains, as a share."""
    size = float(other @ other)
    return _share(whole - float(whole @ other) / size * other, whole) if size else 1.0


def _share(part: Tensor, whole: Tensor) -> float:
    size = float(whole.norm())
    return float(part.norm()) / size if size else float(part.norm())


@torch.no_grad()
def whole_of(tensor: Tensor) -> Tensor:
    """All of it on this rank. Collective for a DTensor."""
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


@torch.no_grad()
def pieces_of(model: nn.Module) -> dict[str, Piece]:
    """What this rank holds of every parameter."""
    return {
        name: Piece(
            shape=tuple(parameter.shape),
            count=local_of(parameter.detach()).numel(),
            itemsize=parameter.element_size(),
            part=_part_of(parameter),
        )
        for name, parameter in named_parameters(model).items()
    }


def _part_of(parameter: Tensor) -> str:
    """Where this rank stands on the axes that split the parameter: `1/2 0/4`; empty for all."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return ""
    place = data.device_mesh.get_coordinate()
    assert place is not None, "a rank holds parameters of its own meshes"
    return " ".join(
        f"{place[axis]}/{data.device_mesh.size(axis)}"
        for axis, placement in enumerate(data.placements)
        if not placement.is_replicate()
    )


def digests_of(model: nn.Module) -> dict[str, str]:
    """SHA-256 of the bytes that this rank holds of every parameter."""
    return {
        name: _sha256(local_of(parameter.detach()))
        for name, parameter in named_parameters(model).items()
    }


def _sha256(tensor: Tensor) -> str:
    plain = tensor.cpu().contiguous()
    return hashlib.sha256(plain.flatten().view(torch.uint8).numpy().data).hexdigest()


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    """Storage behind the tensors on this rank, not what they show of it: a whole tensor that is
    still alive behind a shard counts whole."""
    parameters = list(named_parameters(model).values())
    states = [
        value
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    return Bytes(
        parameters=_storage_bytes(parameters),
        gradients=_storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=_storage_bytes(states),
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        storage = local_of(tensor.detach()).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
