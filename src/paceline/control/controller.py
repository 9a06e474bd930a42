"""The controller's shell: sockets, clock and journal around the pure `core.decide`."""

import asyncio
import hmac
import itertools
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.agent import LINE_LIMIT
from paceline.control.beats import BEAT_EVERY_S, Beats
from paceline.control.connection import Connection
from paceline.control.core import decide
from paceline.control.probe import Prober
from paceline.record.events import AnyEvent, EventLog


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """What an agent needs to find its controller."""

    node: int
    controller: str
    """host:port"""

    token: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run is, after a message of a worker."""

    rank: int
    message: say.FromWorker
    num_alive: int
    num_ranks: int


class Controller:
    """Runs one job to its end on agents that `start_agent` brings up."""

    def __init__(
        self,
        *,
        setup: st.Setup,
        faults: tuple[str, ...],
        events: EventLog,
        start_agent: Callable[[AgentAddress], None],
        kill_agent: Callable[[int], None],
        on_event: Callable[[AnyEvent], None] = lambda event: None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """Args:
        start_agent: Places an agent on a node; called again when that agent was lost.
        kill_agent: Ends a node's agent and all its workers by force; harmless when it is gone.
        on_event: Told of every event after it is in the log.
        on_progress: Told of everything a worker says.
        """
        self._state = st.State(setup=setup, faults=faults)
        self._events = events
        self._start_agent = start_agent
        self._kill_agent = kill_agent
        self._on_event = on_event
        self._on_progress = on_progress
        self._token = secrets.token_hex(16)
        self._address = ""
        self._agents: dict[int, Connection] = {}
        self._beats = Beats(heartbeat_s=setup.heartbeat_s)
        self._probe_ports: dict[int, int] = {}
        self._newest_step = 0
        self._over = asyncio.Event()
        self._error: Exception | None = None

    async def run(self) -> st.State:
        """The state at the end; `outcome` and `reason` say how it went."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._connection, "127.0.0.1", 0, backlog=4096)
        host, port = server.sockets[0].getsockname()[:2]
        self._address = f"{host}:{port}"
        _, prober = await loop.create_datagram_endpoint(
            lambda: Prober(lambda node: self._beats.answered(node, time.monotonic())),
            local_addr=("127.0.0.1", 0),
        )
        stopping = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: outlive the terminal
            stopping.remove(signal.SIGHUP)
        for number in stopping:
            wanted = st.StopWanted(signal.Signals(number).name)
            loop.add_signal_handler(number, self._feed, wanted)
        ticking = asyncio.create_task(self._tick(prober))
        try:
            self._feed(st.Begin())
            await self._over.wait()
            if self._error is not None:
                raise self._error
            await self._drain()
        finally:
            ticking.cancel()
            for number in stopping:
                loop.remove_signal_handler(number)
            for connection in list(self._agents.values()):
                connection.close()
            prober.close()
            server.close()
        return self._state

    def _feed(self, event: st.Happening) -> None:
        """Decide and act. An error here ends the run: the agents then stop their workers."""
        try:
            self._turn(event)
        except Exception as error:  # noqa: BLE001 - asyncio's callbacks would swallow it
            self._error = error
            self._over.set()

    def _turn(self, event: st.Happening) -> None:
        clock = st.Clock(monotonic_s=time.monotonic(), unix_s=time.time())
        for action in decide(self._state, event, clock):
            self._act(action)
        if self._state.phase == "over":
            self._over.set()

    def _act(self, action: st.Action) -> None:
        match action:
            case st.Record(event):
                self._events.write(event)
                self._on_event(event)
            case st.Send(node, message):
                connection = self._agents.get(node)
                if connection is not None:
                    connection.send(message)
            case st.KillAgent(node):
                self._kill_agent(node)
            case st.StartAgent(node):
                self._start_agent(AgentAddress(node, self._address, self._token))

    def _connection(self) -> Connection:
        return Connection(
            on_message=self._hear,
            on_beat=lambda node: self._beats.heard(node, time.monotonic()),
            on_end=self._end_of,
            line_limit=LINE_LIMIT,
        )

    def _hear(self, connection: Connection, message: say.FromAgent) -> None:
        """Any message of an agent but a beat."""
        node = connection.node
        if isinstance(message, say.AgentReady):
            known = hmac.compare_digest(message.token, self._token)
            if not known or message.node in self._agents or node is not None:
                connection.close()
                return
            connection.node = message.node
            self._agents[message.node] = connection
            self._probe_ports[message.node] = message.probe_port
            self._beats.joined(message.node, time.monotonic())
            self._feed(st.AgentJoined(message.node))
        elif node is None or isinstance(message, say.Beat):
            connection.close()  # whoever does not say who it is first is not one of ours
        else:
            self._beats.heard(node, time.monotonic())
            self._feed(message)
            self._show(message)

    def _end_of(self, connection: Connection) -> None:
        node = connection.node
        if node is not None and self._agents.get(node) is connection:
            del self._agents[node]
            self._beats.left(node)
            self._feed(st.AgentLost(node))

    def _check_beats(self, prober: Prober) -> None:
        """Ask silent agents by the second way, and give up those that nothing speaks for."""
        checked = self._beats.check(time.monotonic())
        for node in checked.ask:
            connection = self._agents.get(node)
            host = connection.host if connection is not None else None
            if host is not None:
                prober.ask(node, host, self._probe_ports.get(node, 0))
        for node, _ in checked.lost:
            connection = self._agents.get(node)
            if connection is not None:
                connection.abort()
                self._end_of(connection)

    def _show(self, message: say.FromAgent) -> None:
        if isinstance(message, say.Said) and message.generation == self._state.generation:
            self._note_step(message.message)
            worker = self._state.workers.get(message.worker)
            if worker is None or worker.rank is None:
                return
            self._on_progress(
                Progress(
                    rank=worker.rank,
                    message=message.message,
                    num_alive=self._state.num_alive,
                    num_ranks=self._state.setup.num_ranks,
                )
            )

    def _note_step(self, word: say.FromWorker) -> None:
        """A step that one rank finished was voted for by all, so all lived then."""
        if isinstance(word, say.StepDone) and word.step != self._newest_step:
            if word.step > self._newest_step:
                self._beats.step_finished()
            self._newest_step = word.step

    async def _tick(self, prober: Prober) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(BEAT_EVERY_S)
            self._check_beats(prober)
            if number % 2 == 0:
                self._feed(st.Tick())

    async def _drain(self) -> None:
        """Let the agents end their workers and leave before the connection closes."""
        deadline = time.monotonic() + 10
        while self._agents and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
