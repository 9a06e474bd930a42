"""The second way to ask an agent whether it is there: a datagram, answered by a thread of its own.

An agent whose event loop is held up still answers; one that is stopped, or whose machine is gone,
does not. What is sent back is what came.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import cast

from paceline.control.network import bound_socket

_LONGEST = 64


def answer_probes(host: str) -> int:
    """Answer from now on, until this process ends; returns the port."""
    listener = bound_socket(host, 0, socket.SOCK_DGRAM)
    threading.Thread(target=_answer, args=(listener,), name="paceline-probe", daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _answer(listener: socket.socket) -> None:
    while True:
        with contextlib.suppress(OSError):  # whoever asked may be gone
            word, asker = listener.recvfrom(_LONGEST)
            listener.sendto(word, asker)


class Prober(asyncio.DatagramProtocol):
    """The controller's side: asks, and tells who answered."""

    def __init__(self, on_answer: Callable[[int], None]) -> None:
        """Args:
        on_answer: Told the node that answered.
        """
        self._on_answer = on_answer
        self._transport: asyncio.DatagramTransport | None = None
        self._asked: dict[bytes, int] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def ask(self, node: int, host: str, port: int) -> None:
        """Send one datagram; an answer is told of when it comes."""
        if self._transport is None or not port:
            return
        if len(self._asked) > _MOST_ASKED:
            self._asked.clear()
        word = secrets.token_bytes(16)
        self._asked[word] = node
        self._transport.sendto(word, (host, port))

    def datagram_received(self, data: bytes, addr: tuple[str | int, ...]) -> None:
        node = self._asked.pop(data, None)
        if node is not None:
            self._on_answer(node)

    def error_received(self, exc: Exception) -> None:
        """Nobody listens there any more: silence, which says the same."""

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


_MOST_ASKED = 1 << 16
"""Questions without an answer that are remembered. A guess: two for each of the most nodes."""
