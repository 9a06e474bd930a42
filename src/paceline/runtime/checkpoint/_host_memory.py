"""New memory of the host for optimizer state that is read: in large pages where there are any.

New memory costs the first touch of its pages: 0.52 s a GB at 4 KiB each, 0.11 s at 2 MiB, beside
0.11 s for reading and hashing as much (measured, Linux 6.18, AMD EPYC, virtual machine). Where its
host has no memory behind a page yet, that dominates: 2.5 s a GB, seen with large pages. Advice on
what `malloc` gave comes too late: where it has written before a tensor there is a small page, and
no large one can be.
"""

import contextlib
import mmap

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.runtime.optimizer.sharded import like

_BLOCK_BYTES = 64 << 20
"""Address space that is taken at once; a guess. What is not used of it is never touched."""

_PAGE_BYTES = 2 << 20
"""A huge page of x86-64, and of arm64 with small pages of 4 KiB. Since 6.7 Linux begins a mapping
of whole ones at a multiple."""

_ALIGN_BYTES = 64
"""Where a tensor may begin: a cache line, as torch's own."""


class Room:
    """Hands out the memory, one tensor behind the other.

    Each has a storage of its own. A block is given back with the last tensor that lies in it.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._end = 0

    def like(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """What `torch.empty_like` gives."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        is_plain = parameter.is_contiguous() and local.is_contiguous()
        if local.device.type != "cpu" or not is_plain or local.numel() == 0:
            return torch.empty_like(parameter, dtype=dtype)
        block, start = self._take(local.numel() * dtype.itemsize)
        flat = torch.frombuffer(block, dtype=dtype, count=local.numel(), offset=start)
        return like(parameter, flat.view(local.shape), parameter.shape)

    def _take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        if self._block is None or self._end + num_bytes > len(self._block):
            size = max(_BLOCK_BYTES, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES)
            self._block, self._end = _map(size), 0
        start = self._end
        self._end += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._block, start


def _map(num_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
