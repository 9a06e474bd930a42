"""What errors of torch and Python say when the cause is another rank, or memory."""

_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "connection was lost",
    "Connection refused",
    "NCCL communicator was aborted",
    "remote process exited",
    "failed to recv, got 0 bytes",
    "Connection was likely closed",
    "closed the connection",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "Application timeout caused pair closure",
    "NCCL timeout in:",
    "collective operation timeout",
    "unhandled system error",
)
"""What gloo and NCCL say when another rank goes away, or does not come (torch 2.13, gloo's
transport/tcp/pair.cc and unbound_buffer.cc, NCCLUtils.hpp, ProcessGroupNCCL.cpp). NCCL's system
error is mostly a socket's. One that has a cause on this machine comes back in each generation, and
its text is in the reason for which the run stops."""


def names_lost_peer(text: str) -> bool:
    """Whether an error is of a rank that is gone, and so not this rank's own.

    `[Errno` is in the texts of Python's own sockets, which the program uses, and never in torch's.

    >>> names_lost_peer("[gloo/transport/tcp/pair.cc:547] Connection refused")
    True
    >>> names_lost_peer("ConnectionRefusedError: [Errno 111] Connection refused")
    False
    """
    return "[Errno " not in text and any(phrase in text for phrase in _PEER_LOST)


_OUT_OF_MEMORY = ("MemoryError", "out of memory", "Cannot allocate memory", "can't allocate memory")
"""What Python, torch's allocators (CUDA's and the CPU's DefaultCPUAllocator, torch 2.13) and the C
library say."""


def names_want_of_memory(text: str) -> bool:
    """Whether an error only says that memory ran out, which is not the hardware's fault."""
    return any(phrase in text for phrase in _OUT_OF_MEMORY)
