"""Which part of the state this rank writes, and a copy of it to write from."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_share(state: Mapping[str, Any], rank: int, world: int) -> dict[str, Any]:
    """What this rank writes: its shard of every sharded tensor, and its share of the others.

    Tensors that all ranks hold whole are dealt out so that every rank writes about the same number
    of bytes; the largest first, each to the rank with the least so far. Other values are rank 0's.
    Every rank comes to the same deal without talking.
    """
    share: dict[str, Any] = {}
    whole: list[tuple[int, str]] = []
    for name, value in state.items():
        if isinstance(value, DTensor):
            share[name] = value
        elif isinstance(value, Tensor):
            whole.append((-value.nbytes, name))
        elif rank == 0:
            share[name] = value
    load = [0] * world
    for negative_bytes, name in sorted(whole):
        writer = load.index(min(load))
        load[writer] -= negative_bytes
        if writer == rank:
            share[name] = state[name]
    return share


def local_bytes(share: Mapping[str, Any]) -> int:
    """Bytes of the tensors of a share that lie on this rank."""
    return sum(_local(value).nbytes for value in share.values() if isinstance(value, Tensor))


class Stage:
    """A copy of a share in host memory, so that training may go on while it is written.

    The memory is kept from save to save: after the first, staging costs one plain copy.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def copy(self, share: Mapping[str, Any]) -> dict[str, Any]:
        """The share's values as they are now. The last copy returned is overwritten."""
        staged = {name: self._copy_one(name, value) for name, value in share.items()}
        if any(isinstance(v, Tensor) and v.device.type == "cuda" for v in share.values()):
            torch.cuda.synchronize()
        return staged

    def _copy_one(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        source = _local(value)
        kept = self._copies.get(name)
        if kept is None or kept.shape != source.shape or kept.dtype != source.dtype:
            pinned = source.device.type == "cuda"
            kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            self._copies[name] = kept
        kept.copy_(source, non_blocking=True)
        if not isinstance(value, DTensor):
            return kept
        return DTensor.from_local(
            kept,
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )


def _local(value: Tensor) -> Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()
