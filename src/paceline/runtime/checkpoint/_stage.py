"""A copy of a rank's share in memory that another process can read."""

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from paceline.runtime.checkpoint._memory import make_memory, map_memory
from paceline.runtime.checkpoint._share import Share

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
        on_accelerator = any(each is not None and each.is_cuda for each in share.tensors)
        if end > self.num_bytes or self._memory is None:
            self._make_room(end, pinned=on_accelerator)
        for start, tensor in zip(starts, share.tensors, strict=True):
            if tensor is not None and tensor.numel():
                self._at((start, tuple(tensor.shape), tensor.dtype)).copy_(
                    tensor, non_blocking=True
                )
        if on_accelerator:
            torch.cuda.synchronize()
        return tuple(starts)

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
        # What was mapped before is unmapped with the last tensor that lies in it.
        self._tensors, self._memory = {}, None
        if self.fd is not None:
            os.close(self.fd)
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self.fd = make_memory("paceline-stage", self.num_bytes)
        self._memory = map_memory(self.fd, self.num_bytes, populate=True)
        if pinned:
            whole = torch.frombuffer(self._memory, dtype=torch.uint8)
            # Copies from the accelerator are asynchronous and fast only into pinned memory. Where
            # it refuses (a limit on locked memory), they are slower and as right.
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
