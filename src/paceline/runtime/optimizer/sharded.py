"""What an optimizer needs of a parameter that may be a shard: its local part, and sums over shards.

A parameter is a plain tensor, or a DTensor over the ranks that share it: FSDP2's shards of rows,
tensor parallelism's of rows or columns, experts of the first dim, or several of them at once.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement


def split_dims(tensor: Tensor) -> list[tuple[dist.ProcessGroup, int]]:
    """For each group of ranks that shares the tensor, the dim it is split along."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    found = [(axis, _dim_of(placement)) for axis, placement in enumerate(tensor.placements)]
    return [
        (mesh.get_group(axis), dim)
        for axis, dim in found
        if dim is not None and mesh.size(axis) > 1
    ]


def _dim_of(placement: Placement) -> int | None:
    dim = getattr(placement, "dim", None)  # Shard and its strided kind
    return dim if isinstance(dim, int) else None


def like(parameter: Tensor, part: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another shape, split as the parameter is where they have the same dims.

    Args:
        parameter: Says over which ranks; dims where `shape` is 1 are whole on every rank.
    """
    if not isinstance(parameter, DTensor):
        return part
    placements = _placements(parameter, shape)
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, placements, run_check=False, shape=size, stride=stride
    )


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """A state that was loaded whole, as `like` lays it out; what is laid out already as it is."""
    if not isinstance(parameter, DTensor) or isinstance(whole, DTensor):
        return whole
    placements = _placements(parameter, whole.shape)
    mesh = parameter.device_mesh
    replicated = [Replicate()] * mesh.ndim
    spread = DTensor.from_local(whole.to(parameter.device), mesh, replicated, run_check=False)
    return spread.redistribute(placements=placements)


def _placements(parameter: DTensor, shape: Sequence[int]) -> list[Placement]:
    """The parameter's, but whole along dims in which the shape is 1 and the parameter's is not."""
    return [
        Replicate()
        if (dim := _dim_of(placement)) is None or shape[dim] == 1 != parameter.shape[dim]
        else placement
        for placement in parameter.placements
    ]


class Sums:
    """Many small sums over shards, in one collective for each group of ranks.

    sums = Sums()
    sums.add(rows, groups_that_share_columns)
    sums.run()      # collective; `rows` is the whole sum now
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Tensor, list[dist.ProcessGroup]]] = []

    def add(self, partial: Tensor, groups: Iterable[dist.ProcessGroup]) -> Tensor:
        """Sum a tensor in place over each of these groups, when `run` is called."""
        self._pieces.append((partial, list(groups)))
        return partial

    def run(self) -> None:
        """In the order the groups were first named, which is the same on all their ranks."""
        by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
        for partial, groups in self._pieces:
            for group in groups:
                by_group.setdefault(group, []).append(partial)
        for group, pieces in by_group.items():
            flat = torch.cat([piece.reshape(-1) for piece in pieces])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [piece.numel() for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(part.view_as(piece))
        self._pieces = []
