"""An agent's end of the conversation with its controllers, one after the other.

What the agent reports is numbered and kept until a controller has it for good; see
`reliable_link.py`.

Leaves out what the agent does about an order (`agent.py`).
"""

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from paceline.control import messages as say
from paceline.control.frames import Order, Report, open_order, seal
from paceline.control.heartbeats import BEAT_EVERY_S
from paceline.control.probe import answer_probes
from paceline.control.reliable_link import Inbox, Lost, Outbox
from paceline.record.ownership import find_controller

RETRY_S = 0.1
"""Between two attempts to find a controller. A guess: a new one is there after some ten
milliseconds."""

CONNECT_S = 2.0
"""How long an attempt may take, and then the welcome. A guess: it takes a millisecond, unless the
way is cut."""

BEATS_A_TALLY = 5
"""Beats from one to the next that says how much was said, so that what was lost is missed even when
nothing follows."""

FIRST_S = 30.0
"""How long an agent looks for its first controller. A guess: half of what that waits for it."""

MOST_KEPT = 20_000
"""Messages kept for a controller to come, before news of steps are forgotten. A guess: some hundred
steps a second for the time of a lease."""

LINE_LIMIT = 1 << 20
"""Longest message in bytes; a worker's last words are cut well below it."""


class Uplink:
    """The way to whatever controller there is."""

    def __init__(
        self,
        *,
        run: Path,
        node: int,
        controller: tuple[str, int],
        token: str,
        obey: Callable[[say.ToAgent], Awaitable[None]],
    ) -> None:
        self._run = run
        self._node = node
        self._first_controller = controller
        self._token = token
        self._obey = obey
        self._incarnation = secrets.token_hex(8)
        self._outbox: Outbox[say.FromAgent] = Outbox(limit=MOST_KEPT, can_drop=_is_passing)
        self._inbox = Inbox()
        self._epoch = 0
        self._is_known = False
        self._lease_s = 0.0
        self._heard_s = time.monotonic()
        self._probe_port = 0
        self._to_controller: asyncio.StreamWriter | None = None

    async def follow(self) -> None:
        """Returns when one has said leave, or none has welcomed this agent."""
        while True:
            connection = await self._connect()
            if connection is not None and await self._converse(*connection):
                return
            if not self._is_known and time.monotonic() - self._heard_s > FIRST_S:
                return
            await asyncio.sleep(RETRY_S)

    async def lose(self) -> None:
        """Returns when no controller has been heard for the time of the lease."""
        while True:
            await asyncio.sleep(min(1.0, max(0.1, self._lease_s / 20)))
            silent_s = time.monotonic() - self._heard_s
            writer = self._to_controller
            if writer is not None and silent_s > self._lease_s / 2:
                writer.transport.abort()  # connected, and yet nothing comes
            if self._is_known and silent_s > self._lease_s:
                return

    async def beat(self) -> None:
        """Let the controller know that the agent is there, for ever."""
        for number in itertools.count():
            writer = self._to_controller
            if writer is not None and not writer.is_closing():
                writer.write(say.encode(say.Beat()))
                if number % BEATS_A_TALLY == 0:
                    tally = self._frame(say.Beat(), 0, self._outbox.last)
                    writer.write(seal(tally))
            await asyncio.sleep(BEAT_EVERY_S)

    def report(self, message: say.FromAgent) -> None:
        """Have a controller hear this: the one that is there, or the next one."""
        number, before = self._outbox.add(message)
        writer = self._to_controller
        if writer is not None and not writer.is_closing():
            writer.write(seal(self._frame(message, number, before)))

    def disconnect(self) -> None:
        """Break the connection, as a drill's fault does."""
        if self._to_controller is not None:
            self._to_controller.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        found = find_controller(self._run) if self._is_known else None
        host, port = found.address if found is not None else self._first_controller
        try:
            opening = asyncio.open_connection(host, port, limit=LINE_LIMIT)
            return await asyncio.wait_for(opening, CONNECT_S)
        except (OSError, TimeoutError):
            return None

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Go through one connection, to its end; whether the controller said leave."""
        if not self._probe_port:
            self._probe_port = answer_probes(writer.get_extra_info("sockname")[0])
        ready = say.AgentReady(
            node=self._node,
            token=self._token,
            pid=os.getpid(),
            incarnation=self._incarnation,
            is_known=self._is_known,
            epoch=self._epoch,
            probe_port=self._probe_port,
        )
        writer.write(seal(self._frame(ready)))
        try:
            while line := await self._line(reader):
                order = open_order(line)
                if order.epoch < self._epoch:
                    return False  # of a controller that has a successor
                self._epoch, self._heard_s = order.epoch, time.monotonic()
                self._outbox.heard(order.heard)
                if isinstance(order.message, say.Welcome):
                    self._is_known, self._lease_s = True, order.message.lease_s
                    for number, before, message in list(self._outbox.after(order.heard)):
                        writer.write(seal(self._frame(message, number, before)))
                    self._to_controller = writer
                elif self._to_controller is None and order.number:
                    return False  # the welcome was lost
                elif self._is_new(order) and order.message is not None:
                    await self._obey(order.message)
                    if isinstance(order.message, say.Leave):
                        return True
        except (OSError, TimeoutError, ValueError, msgspec.DecodeError, Lost):
            pass  # a broken or damaged connection: the next one says again what is missing
        finally:
            self._to_controller = None
            writer.close()
        return False

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        patience_s = None if self._to_controller is not None else CONNECT_S
        return await asyncio.wait_for(reader.readline(), patience_s)

    def _is_new(self, order: Order) -> bool:
        """Whether it has not come before.

        Raises:
            Lost: Something before it has not come.
        """
        if order.number:
            return self._inbox.take(order.number, order.before)
        self._inbox.check(order.before)
        return True

    def _frame(self, message: say.FromAgent, number: int = 0, before: int = 0) -> Report:
        return Report(number=number, before=before, heard=self._inbox.last, message=message)


def _is_passing(message: say.FromAgent) -> bool:
    """News that later ones make old."""
    if isinstance(message, say.Said):
        return isinstance(message.message, say.StepDone)
    return isinstance(message, say.Stuck | say.Seen)
