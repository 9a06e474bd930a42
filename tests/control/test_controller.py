"""The controller's shell over real sockets, with agents that the test plays."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from tests.control.test_core import SPARE

from paceline.control import messages as say
from paceline.control.controller import AgentAddress, Controller
from paceline.control.failover import Memory, replay, snapshot
from paceline.control.frames import Order, Report, open_order, seal
from paceline.control.journal import Journal
from paceline.control.state import State
from paceline.record.events import AlertFired, AnyEvent, event_log, read_events

TOKEN = "secret"


class Nowhere:
    """Agents are started by nobody."""

    kills_surely = True

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.killed: list[int] = []

    def start(self, address: AgentAddress) -> None:
        pass

    def kill(self, node: int, pid: int) -> None:
        self.killed.append(pid)

    def is_gone(self, node: int, pid: int) -> bool:
        return pid in self.gone


class Agent:
    """One connection of an agent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def speak(
        self, message: say.FromAgent, number: int = 0, before: int = 0, heard: int = 0
    ) -> None:
        frame = Report(number=number, before=before, heard=heard, message=message)
        self.write(seal(frame))

    def write(self, line: bytes) -> None:
        self._writer.write(line)

    def ready(self, incarnation: str = "a", *, heard: int = 0, **changes: object) -> None:
        known = {"node": 0, "token": TOKEN, "pid": 77, "incarnation": incarnation}
        self.speak(say.AgentReady(**{**known, **changes}), heard=heard)  # type: ignore[arg-type]

    async def hear(self) -> Order | None:
        """The next order; None when the controller has closed."""
        while line := await asyncio.wait_for(self._reader.readline(), 60):
            order = open_order(line)
            if order.message is not None:
                return order
        return None

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nowhere = Nowhere()
        self.memory = Memory(state=State(setup=SPARE), token=TOKEN, lines_before=0)
        self.path = folder / "journal"
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.agents: list[Agent] = []
        self.controller: Controller

    async def connect(self) -> Agent:
        self.agents.append(Agent(*await asyncio.open_connection(*self.listener.getsockname())))
        return self.agents[-1]

    def play(self, story: Callable[["Scene"], Awaitable[None]]) -> None:
        """A controller, and the story beside it."""
        journal = Journal(self.path)
        journal.begin(snapshot(self.memory))
        self.listener.setblocking(False)
        controller = Controller(
            memory=self.memory,
            journal=journal,
            listener=self.listener,
            events=event_log(self.folder / "events.jsonl"),
            agents=self.nowhere,
            lease_s=30.0,
        )
        self.controller = controller

        async def both() -> None:
            running = asyncio.create_task(controller.run())
            await asyncio.wait_for(story(self), 120)
            assert not running.done(), running.result()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            for agent in self.agents:
                await agent.close()

        asyncio.run(both())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_an_order_is_in_the_journal_before_it_is_sent(scene):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready()
        while (order := await agent.hear()) is not None:
            if isinstance(order.message, say.StartWorker):
                break
        found = replay(scene.path).memory
        assert set(found.state.workers) == {0, 1}
        assert found.links[0].incarnation == "a"

    scene.play(story)


def test_what_is_only_noted_is_in_the_journal_and_not_synced(scene, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)

    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready()
        for _ in range(3):  # the welcome, and an order for each rank
            await agent.hear()
        num_synced = len(synced)
        assert num_synced
        agent.speak(say.Started(worker=0, pid=100), 1, 0)
        while replay(scene.path).memory.state.workers[0].pid is None:
            await asyncio.sleep(0.01)
        assert len(synced) == num_synced

    scene.play(story)


def test_what_is_found_beside_the_run_goes_through_the_journal_into_the_record(scene):
    fired = AlertFired(rule="high", condition="train/loss > 1", metric="train/loss", value=2.0)
    path = scene.folder / "events.jsonl"

    def rules(events: list[AnyEvent]) -> list[str]:
        return [event.rule for event in events if isinstance(event, AlertFired)]

    async def story(scene: Scene) -> None:
        await asyncio.to_thread(scene.controller.report, fired)
        while not rules(read_events(path)):
            await asyncio.sleep(0.01)
        assert rules(replay(scene.path).events) == ["high"]

    scene.play(story)
    scene.controller.report(fired)
    assert scene.controller.take_unrecorded() == [fired]
    assert rules(read_events(path)) == ["high"]


def test_an_agent_that_connects_again_hears_what_it_lacks_and_is_heard_once(scene):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready()
        welcome, first, second = [await agent.hear() for _ in range(3)]
        assert isinstance(welcome.message, say.Welcome)
        assert [first.number, second.number] == [1, 2]
        agent.speak(say.Started(worker=0, pid=100), 1, 0)
        await agent.close()
        again = await scene.connect()
        again.ready(heard=1, is_known=True, epoch=1)
        welcome, order = [await again.hear() for _ in range(2)]
        assert welcome.heard == 1
        assert order == msgspec.structs.replace(second, heard=1)
        again.speak(say.Started(worker=0, pid=666), 1, 0)  # once more
        again.speak(say.Started(worker=1, pid=101), 2, 1)
        while scene.memory.state.workers[1].pid is None:
            await asyncio.sleep(0.01)
        assert scene.memory.state.workers[0].pid == 100

    scene.play(story)


@pytest.mark.parametrize("line", [b"garbage\n", b"00000000 {}\n", b"\xff\xfe\n"])
def test_a_damaged_line_ends_the_connection_and_not_the_agent(scene, line):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready()
        await agent.hear()
        agent.write(line)
        while await agent.hear() is not None:
            pass
        assert scene.memory.state.agents == {0}
        again = await scene.connect()
        again.ready(heard=2, is_known=True, epoch=1)
        welcome = await again.hear()
        assert isinstance(welcome.message, say.Welcome)

    scene.play(story)


def test_a_missing_word_ends_the_connection(scene):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready()
        agent.speak(say.Started(worker=1, pid=101), 2, 1)
        while await agent.hear() is not None:
            pass
        assert scene.memory.links[0].inbox.last == 0

    scene.play(story)


def test_an_agent_that_has_ended_is_lost_at_once(scene):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready()
        await agent.hear()
        scene.nowhere.gone.add(77)
        await agent.close()
        while scene.memory.state.agents:
            await asyncio.sleep(0.01)
        assert not scene.memory.links

    scene.play(story)


def test_an_agent_that_was_given_up_must_end_its_workers_when_it_comes_back(scene):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready("given up", is_known=True, epoch=1)
        orders = [await agent.hear() for _ in range(3)]
        assert [type(order.message) for order in orders[:2]] == [say.KillWorkers, say.Leave]
        assert orders[2] is None
        assert not scene.memory.state.agents

    scene.play(story)


def test_a_second_agent_of_a_node_is_sent_away(scene):
    async def story(scene: Scene) -> None:
        agent, other = await scene.connect(), await scene.connect()
        agent.ready("first")
        await agent.hear()
        other.ready("second")
        orders = [await other.hear() for _ in range(2)]
        assert isinstance(orders[-1].message, say.Leave)
        assert scene.memory.links[0].incarnation == "first"

    scene.play(story)


@pytest.mark.parametrize("changes", [{"token": "other"}, {"epoch": 2}])
def test_nobody_who_does_not_belong_here_is_welcomed(scene, changes):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.ready(**changes)
        assert await agent.hear() is None
        assert not scene.memory.state.agents

    scene.play(story)


def test_whoever_speaks_before_saying_who_it_is_is_cut_off(scene):
    async def story(scene: Scene) -> None:
        agent = await scene.connect()
        agent.speak(say.Exited(worker=0, pid=1, returncode=-9, fenced=False), 1, 0)
        assert await agent.hear() is None

    scene.play(story)
