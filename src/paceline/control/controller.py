"""The controller's shell: sockets, clock and journal around the pure `core.decide`.

What happens goes into the journal before anything is done about it, so that another controller can
go on where this one dies; see `failover.py`.
"""

import asyncio
import contextlib
import hmac
import itertools
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.agent_connection import Connection
from paceline.control.controller_connection import LINE_LIMIT
from paceline.control.failover import Entry, Link, Memory, advance, encode_entry, snapshot
from paceline.control.frames import Order, Report
from paceline.control.heartbeats import BEAT_EVERY_S, Beats
from paceline.control.journal import Journal
from paceline.control.network import join_address
from paceline.control.probe import Prober
from paceline.control.reliable_link import Lost
from paceline.record.events import AnyEvent, EventLog, Reported
from paceline.record.ownership import machine

RENEWALS = 10
"""How often in a lease an agent hears that the controller is there. A guess: nine may be lost."""

MARGIN_S = 10.0
"""Longer than an agent's lease and grace before the ranks of its workers are given away: it looks
at its lease once a second and takes up to five to end its workers. The rest is a guess."""

RETRY_JOURNAL_S = 10.0
"""Between two attempts to begin a journal on a full disk. A guess."""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """What an agent needs to find its controller."""

    node: int
    controller: str
    """`host:port`, an IPv6 host in brackets."""

    token: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run is, after a message of a worker."""

    rank: int
    message: say.FromWorker
    num_alive: int
    num_ranks: int


class Agents(Protocol):
    """Where agents are started. `pid` is known of those that have reported."""

    def start(self, address: AgentAddress) -> None:
        """Place an agent on a node; called again when that agent was lost."""

    def kill(self, node: int, pid: int) -> None:
        """End a node's agent and all its workers by force; harmless when it is gone."""

    def is_gone(self, node: int, pid: int) -> bool:
        """Whether the agent has surely ended."""

    @property
    def kills_surely(self) -> bool:
        """Whether what `kill` ended has ended; not so on machines that may be out of reach."""


class Controller:
    """Brings one job to its end, from its beginning or from where another controller died."""

    def __init__(
        self,
        *,
        memory: Memory,
        journal: Journal,
        listener: socket.socket,
        events: EventLog,
        agents: Agents,
        lease_s: float,
        on_event: Callable[[AnyEvent], None] = lambda event: None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_beat: Callable[[bool], None] = lambda goes_on: None,
    ) -> None:
        """Args:
        memory: New, or what the last controller knew.
        journal: Begun, or gone on with.
        listener: Where agents connect.
        lease_s: Silence after which agents stop their workers.
        on_event: Told of every event after it is in the log.
        on_progress: Told of everything a worker says.
        on_beat: Told twice a second that the controller decides, and at the end, with False,
            that it does so no more and only waits for agents to go.
        """
        self._memory = memory
        self._journal = journal
        self._listener = listener
        self._events = events
        self._where = agents
        self._lease_s = lease_s
        self._on_event = on_event
        self._on_progress = on_progress
        self._on_beat = on_beat
        host, port = listener.getsockname()[:2]
        self._address = join_address(host, port)
        self._agents: dict[int, Connection] = {}
        self._beats = Beats(heartbeat_s=memory.state.setup.heartbeat_s)
        self._probe_ports: dict[int, int] = {}
        self._newest_step = 0
        self._reported: queue.SimpleQueue[Reported] = queue.SimpleQueue()
        self._machine = machine()
        self._over = asyncio.Event()
        self._error: Exception | None = None

    async def run(self) -> st.State:
        """The state at the end; `outcome` and `reason` say how it went."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._connection, sock=self._listener, backlog=4096)
        _, prober = await loop.create_datagram_endpoint(
            lambda: Prober(lambda node: self._beats.answered(node, time.monotonic())),
            local_addr=(self._listener.getsockname()[0], 0),
        )
        stopping = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: outlive the terminal
            stopping.remove(signal.SIGHUP)
        for number in stopping:
            wanted = st.StopWanted(signal.Signals(number).name)
            loop.add_signal_handler(number, self._feed, wanted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping)
        ticking = asyncio.create_task(self._tick(prober))
        try:
            self._take_charge()
            await self._over.wait()
            if self._error is not None:
                raise self._error
            await self._drain()
            self._journal.end()
        finally:
            ticking.cancel()
            self._on_beat(False)
            for number in stopping:
                loop.remove_signal_handler(number)
            for connection in list(self._agents.values()):
                connection.close()
            prober.close()
            server.close()
        return self._memory.state

    def report(self, event: Reported) -> None:
        """Record what was found beside the run, and act on it, at the next beat; from any
        thread."""
        self._reported.put(event)

    def take_unrecorded(self) -> list[Reported]:
        """What was reported after the run's end."""
        return list(emptied(self._reported))

    @property
    def state(self) -> st.State:
        """What it knows now; only to be read."""
        return self._memory.state

    def _take_charge(self) -> None:
        state, now_s = self._memory.state, time.monotonic()
        if not self._memory.at_s:
            self._feed(st.Begin())
            return
        for node in self._memory.links:  # each may take as long as a silent one to come back
            self._beats.joined(node, now_s)
        self._newest_step = state.furthest_step
        if state.phase == "over":  # it died between the last decision and the end
            self._over.set()
        else:
            self._feed(st.TookOver(away_s=max(0.0, now_s - self._memory.at_s)))

    def _feed(self, event: st.Happening, node: int | None = None, number: int = 0) -> None:
        """Decide and act. An error here ends the run: the agents then stop their workers."""
        try:
            self._turn(event, node, number)
        except Exception as error:  # noqa: BLE001 - asyncio's callbacks would swallow it
            self._error = error
            self._over.set()

    def _turn(self, event: st.Happening, node: int | None, number: int) -> None:
        entry = Entry(
            monotonic_s=time.monotonic(),
            unix_s=time.time(),
            node=node,
            number=number,
            event=event,
        )
        lost = event.node if isinstance(event, st.AgentLost) else None
        pid_of_lost = self._pid_of(lost)
        actions = advance(self._memory, entry)
        # What is only recorded does nothing to the world: a disk that syncs once a rank would take
        # most of the time in which thousands of ranks form.
        acts = any(not isinstance(action, st.Record) for action in actions)
        self._journal.write(encode_entry(entry), sync=acts)
        for action in actions:
            self._act(action, lost, pid_of_lost)
        if self._memory.state.phase == "over":
            self._over.set()
        elif self._journal.is_grown:
            self._journal.begin(snapshot(self._memory))

    def _pid_of(self, node: int | None) -> int:
        """Process id of a node's agent; 0 when it has none."""
        link = self._memory.links.get(node) if node is not None else None
        return link.pid if link is not None else 0

    def _act(self, action: st.Action, lost: int | None, pid_of_lost: int) -> None:
        match action:
            case st.Record(event):
                self._events.write(event)
                self._on_event(event)
            case st.Send(node, _):
                self._send_rest(node)
            case st.KillAgent(node):
                self._where.kill(node, pid_of_lost if node == lost else self._pid_of(node))
            case st.StartAgent(node):
                address = AgentAddress(node, self._address, self._memory.token)
                self._where.start(address)

    def _send_rest(self, node: int) -> None:
        """What the node's agent was not sent on this connection, nor has from another."""
        connection, link = self._agents.get(node), self._memory.links.get(node)
        if connection is None or link is None:
            return
        for number, before, message in list(link.outbox.after(connection.sent)):
            connection.send(self._order(link, message, number=number, before=before))
            connection.sent = number

    def _order(
        self,
        link: Link,
        message: "say.ToAgent | say.Welcome | None",
        number: int = 0,
        before: int = 0,
    ) -> Order:
        return Order(
            epoch=self._memory.state.epoch,
            number=number,
            before=before,
            heard=link.inbox.last,
            message=message,
        )

    def _connection(self) -> Connection:
        return Connection(
            on_message=self._hear,
            on_beat=lambda node: self._beats.heard(node, time.monotonic()),
            on_end=self._end_of,
            line_limit=LINE_LIMIT,
        )

    def _hear(self, connection: Connection, report: Report) -> None:
        node, message = connection.node, report.message
        if isinstance(message, say.AgentReady):
            if node is None and hmac.compare_digest(message.token, self._memory.token):
                self._welcome(connection, message, heard=report.heard)
            else:
                connection.close()
            return
        link = self._memory.links.get(node) if node is not None else None
        if link is None or node is None:
            connection.close()  # whoever does not say who it is first is not one of ours
            return
        self._beats.heard(node, time.monotonic())
        link.outbox.heard(report.heard)
        try:
            if isinstance(message, say.Beat):
                link.inbox.check(report.before)
            elif link.inbox.can_take(report.number, report.before):
                if isinstance(message, say.FaultDone) and message.machine != self._machine:
                    message = _now(message)
                self._feed(message, node, report.number)
                self._show(message)
        except Lost:
            connection.close()  # it comes again, and says again what is missing

    def _welcome(self, connection: Connection, agent: say.AgentReady, *, heard: int) -> None:
        node = agent.node
        link, other = self._memory.links.get(node), self._agents.get(node)
        is_same = link is not None and link.incarnation == agent.incarnation
        if agent.epoch > self._memory.state.epoch:
            connection.close()
            return
        if not is_same and (agent.is_known or other is not None):
            # Given up meanwhile, or one too many. Its ranks may have other workers.
            stranger = Link(agent.incarnation, agent.pid)
            connection.send(self._order(stranger, say.KillWorkers()))
            connection.send(self._order(stranger, say.Leave()))
            connection.close()
            return
        connection.node = node
        if other is not None:
            other.abort()
        if not is_same:
            if link is not None:
                self._lose(node)
            self._feed(st.AgentJoined(node, agent.incarnation, agent.pid))
        self._agents[node] = connection
        self._probe_ports[node] = agent.probe_port
        self._beats.joined(node, time.monotonic())
        link = self._memory.links[node]
        connection.send(self._order(link, say.Welcome(lease_s=self._lease_s)))
        connection.sent = heard
        self._send_rest(node)

    def _end_of(self, connection: Connection) -> None:
        """An agent that lives connects again; only its end or its silence is its loss."""
        node = connection.node
        if node is not None and self._agents.get(node) is connection:
            del self._agents[node]
            # Sockets close before the process has ended, so look again a moment later.
            for moment_s in (0.0, 0.005, 0.02, 0.05, 0.1):
                asyncio.get_running_loop().call_later(moment_s, self._look_after, node)

    def _look_after(self, node: int) -> None:
        """Whether an agent without a connection has ended."""
        link = self._memory.links.get(node)
        if node in self._agents or link is None:
            return
        if self._where.is_gone(node, link.pid):
            self._lose(node)

    def _lose(self, node: int) -> None:
        self._beats.left(node)
        link = self._memory.links.get(node)
        is_certain = self._where.kills_surely or (
            link is not None and self._where.is_gone(node, link.pid)
        )
        # The agent has heard nothing from here since it was given up; then its lease began.
        grace_s = self._memory.state.setup.grace_s
        in_doubt_s = 0.0 if is_certain else self._lease_s + grace_s + MARGIN_S
        self._feed(st.AgentLost(node, in_doubt_s))

    def _check_beats(self, prober: Prober) -> None:
        """Ask silent agents by the second way, and give up those that nothing speaks for."""
        for node in self._memory.links.keys() - self._agents.keys():
            self._look_after(node)
        checked = self._beats.check(time.monotonic())
        for node in checked.ask:
            connection = self._agents.get(node)
            host = connection.host if connection is not None else None
            if host is not None:
                prober.ask(node, host, self._probe_ports.get(node, 0))
        for node, _ in checked.lost:
            connection = self._agents.pop(node, None)
            if connection is not None:
                connection.abort()
            self._lose(node)

    def _show(self, message: say.FromAgent) -> None:
        state = self._memory.state
        if isinstance(message, say.Said) and message.generation == state.generation:
            self._note_step(message.message)
            worker = state.workers.get(message.worker)
            if worker is None or worker.rank is None:
                return
            self._on_progress(
                Progress(
                    rank=worker.rank,
                    message=message.message,
                    num_alive=state.num_alive,
                    num_ranks=state.setup.num_ranks,
                )
            )

    def _note_step(self, word: say.FromWorker) -> None:
        """A step that one rank finished was voted for by all, so all lived then."""
        if isinstance(word, say.StepDone) and word.step != self._newest_step:
            if word.step > self._newest_step:
                self._beats.step_finished()
            self._newest_step = word.step

    async def _tick(self, prober: Prober) -> None:
        renew_every = max(1, round(self._lease_s / RENEWALS / BEAT_EVERY_S))
        for number in itertools.count(1):
            await asyncio.sleep(BEAT_EVERY_S)
            self._check_beats(prober)
            if self._memory.state.phase != "over":
                for event in emptied(self._reported):
                    self._feed(say.ForRecord(event=event))
            if number % 2 == 0:
                self._feed(st.Tick())
                self._on_beat(True)
            if number % renew_every == 0:
                self._renew()
            if self._journal.is_lost and number % round(RETRY_JOURNAL_S / BEAT_EVERY_S) == 0:
                self._journal.begin(snapshot(self._memory))

    def _renew(self) -> None:
        """Tell every agent that the controller is there, and what of its words is kept."""
        for node, connection in self._agents.items():
            link = self._memory.links.get(node)
            if link is not None:
                connection.send(self._order(link, None, before=connection.sent))

    async def _drain(self) -> None:
        """Let the agents end their workers and leave before the connection closes."""
        deadline = time.monotonic() + 10
        while self._memory.links and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def emptied(reported: queue.SimpleQueue[Reported]) -> Iterator[Reported]:
    """What waits there now, in its order; never blocks."""
    with contextlib.suppress(queue.Empty):
        while True:
            yield reported.get_nowait()


def _now(fault: say.FaultDone) -> say.FaultDone:
    """On this machine's clock, as that of the agent's machine means nothing here: when it is heard
    of, which is a message's way too late."""
    return msgspec.structs.replace(fault, monotonic_s=time.monotonic())
