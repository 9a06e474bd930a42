"""A copy of a rank's share in memory that another process can read."""

import mmap
import os
import sys
from typing import Any

import torch
from torch import Tensor

from paceline.runtime.checkpoint._save_plan import Share
from paceline.runtime.checkpoint._shared_memory import make_memory, map_memory
from paceline.runtime.devices import is_accelerator, pins_memory, synchronize
from paceline.units import format_bytes

_ALIGN_BYTES = 64
"""Where values may begin: a cache line, which suits every type."""

_Place = tuple[int, tuple[int, ...], torch.dtype]
"""Where values begin in the memory, and what they are."""


class Stage:
    """The memory, kept from save to save: after the first, staging costs one plain copy."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self.num_bytes = 0
        self._memory: mmap.mmap | None = None
        self._tensors: dict[_Place, Tensor] = {}
        self._pinned: int | None = None
        """Address that CUDA has registered."""

    @torch.no_grad()
    def copy(self, share: Share) -> tuple[int, ...]:
        """Copy the share's values as they are now over what was staged before.

        Returns:
            Where the values of each record begin in the memory.
        """
        starts, end = [], 0
        for record in share.records:
            starts.append(end)
            end += -(-record.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        tensors = [tensor for tensor in share.tensors if tensor is not None]
        devices = {tensor.device for tensor in tensors if is_accelerator(tensor.device)}
        if end > self.num_bytes or self._memory is None:
            self._make_room(end, pinned=any(map(pins_memory, devices)))
        for start, tensor in zip(starts, share.tensors, strict=True):
            if tensor is not None and tensor.numel():
                self._at((start, tuple(tensor.shape), tensor.dtype)).copy_(
                    tensor, non_blocking=True
                )
        for device in devices:
            synchronize(device)
        return tuple(starts)

    def close(self) -> None:
        """Let go of the memory."""
        if self._pinned is not None:
            # Registered memory that is unmapped stays locked, and another mapping at its address
            # cannot be registered.
            _cudart().cudaHostUnregister(self._pinned)
            self._pinned = None
        # What was mapped is unmapped with the last tensor that lies in it.
        self._tensors, self._memory = {}, None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.num_bytes = 0

    def _at(self, place: _Place) -> Tensor:
        kept = self._tensors.get(place)
        if kept is None:
            assert self._memory is not None
            start, shape, dtype = place
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
            kept = self._tensors[place] = flat.view(shape)
        return kept

    def _make_room(self, num_bytes: int, *, pinned: bool) -> None:
        self.close()
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self.fd = make_memory("paceline-stage", self.num_bytes)
        self._memory = map_memory(self.fd, self.num_bytes, populate=True)
        if pinned:
            self._pinned = _pin(torch.frombuffer(self._memory, dtype=torch.uint8))


def _pin(memory: Tensor) -> int | None:
    """Address of memory that CUDA copies to without blocking; None where it refuses (a limit on
    locked memory): copies are slower then and as right. The refusal is logged."""
    result = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(result) == 0:
        return memory.data_ptr()
    print(
        f"paceline: checkpoints are staged in memory that is not pinned, so saves stall training "
        f"for longer: cudaHostRegister of {format_bytes(memory.nbytes)} failed with {result} "
        "(see ulimit -l)",
        file=sys.stderr,
        flush=True,
    )
    return None


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
