"""The controller's end of one agent's connection: lines in, beats counted without a decision.

A beat is the same bytes every time, and with thousands of agents nearly all there is; it is told
by one comparison and never decoded.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import msgspec

from paceline.control import messages as say
from paceline.control.frames import Order, Report, open_report, seal

BEAT = say.encode(say.Beat())


class Connection(asyncio.Protocol):
    """One agent, from its first byte to its last."""

    def __init__(
        self,
        *,
        on_message: Callable[["Connection", Report], None],
        on_beat: Callable[[int], None],
        on_end: Callable[["Connection"], None],
        line_limit: int,
    ) -> None:
        """Args:
        on_message: Told of every message but beats; `node` is None until it sets it.
        on_beat: Told the node of every beat.
        on_end: Told once, when the connection has ended.
        line_limit: Longest message in bytes; whoever sends more is cut off.
        """
        self.node: int | None = None
        self.sent = 0
        """Number of the last order that was sent here."""

        self._on_message = on_message
        self._on_beat = on_beat
        self._on_end = on_end
        self._line_limit = line_limit
        self._unread = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if data == BEAT and not self._unread and self.node is not None:
            self._on_beat(self.node)
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines:
                self._take(line)
        except msgspec.DecodeError:
            self.close()  # a broken connection is a lost agent
        if len(self._unread) > self._line_limit:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(self)

    @property
    def host(self) -> str | None:
        """Where the agent is; None before and after."""
        if self._transport is None or self._transport.is_closing():
            return None
        host: str = self._transport.get_extra_info("peername")[0]
        return host

    def send(self, order: Order) -> None:
        """Send now, if it still can be."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(seal(order))

    def close(self) -> None:
        """End it once everything is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, line: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if line == BEAT[:-1] and self.node is not None:
            self._on_beat(self.node)
        else:
            self._on_message(self, open_report(line))
