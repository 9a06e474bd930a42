"""TCP ports for launchers that want to be told one."""

import contextlib
import random
import socket


def free_ports(count: int = 4) -> int:
    """The first of so many TCP ports in a row that nobody has, below those of the kernel's own."""
    for first in random.sample(range(20000, 30000, count), 50):
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for port in range(first, first + count):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports")
