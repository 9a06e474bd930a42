"""Memory that processes share and that leaves nothing behind. No torch.

It is anonymous (memfd_create(2); an unlinked file where there is none): no name in /dev/shm, so it
is gone with the processes that map it, whatever ended them. Linux shows it as `paceline-stage` in
/proc/PID/maps.
"""

import mmap
import os
import sys
import tempfile


def make_memory(name: str, num_bytes: int) -> int:
    """Descriptor of new memory, all zero."""
    if sys.platform == "linux":
        descriptor = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def map_memory(descriptor: int, num_bytes: int, *, populate: bool = False) -> mmap.mmap:
    """The memory in this process; populated, its pages are there at once and not at first touch."""
    flags = mmap.MAP_SHARED
    if populate and sys.platform == "linux":
        flags |= mmap.MAP_POPULATE
    return mmap.mmap(descriptor, num_bytes, flags=flags)
