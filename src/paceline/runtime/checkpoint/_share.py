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
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}  # what is handed out, and its memory

    @torch.no_grad()
    def copy(self, share: Mapping[str, Any]) -> dict[str, Any]:
        """The share's values as they are now. The last copy returned is overwritten."""
        staged: dict[str, Any] = {}
        on_accelerator = False
        for name, value in share.items():
            if not isinstance(value, Tensor):
                staged[name] = copy.deepcopy(value)
                continue
            source = _local(value)
            on_accelerator |= source.device.type == "cuda"
            staged[name], memory = self._room(name, value, source)
            memory.copy_(source, non_blocking=True)
        if on_accelerator:
            torch.cuda.synchronize()
        return staged

    def _room(self, name: str, value: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        kept = self._copies.get(name)
        if kept is not None and (kept[1].shape, kept[1].dtype) == (source.shape, source.dtype):
            return kept
        pinned = source.device.type == "cuda"
        memory = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
        handed_out: Tensor = memory
        if isinstance(value, DTensor):
            handed_out = DTensor.from_local(
                memory,
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        self._copies[name] = handed_out, memory
        return self._copies[name]


@torch.no_grad()
def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
