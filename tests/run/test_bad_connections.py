"""A run whose control connections lose, double, swap and damage lines, and break."""

import asyncio
import random

import pytest
from tests.run.by_hand import Remote, control
from tests.run.scene import Record, Scene

from paceline.record import events as log
from paceline.record.run import RunFolder

pytestmark = pytest.mark.ranks

SETTINGS = (
    "cluster.nodes=2",
    "cluster.per_node=1",
    "train.steps=60",
    "checkpoint.every=20",
    "recovery.spares=1",
)

LIKELIHOOD = {"lose": 0.01, "twice": 0.02, "swap": 0.02, "flip": 0.01, "break": 0.005}
"""Of each line, both ways."""

EVERY = 25
"""Every so many lines a kind that has not happened yet does: a short run has too few for all."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("connections"))


@pytest.fixture(scope="module")
def clean(scene: Scene) -> Record:
    return scene.run("clean", *(part for each in SETTINGS for part in ("--set", each)))


class BadProxy:
    """Between agents and their controller."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.port = 0
        self.done: dict[str, int] = dict.fromkeys(LIKELIHOOD, 0)
        self._controller = ("", 0)
        self._lines = 0

    def serve(self, controller: tuple[str, int]) -> "asyncio.Future[None]":
        self._controller = controller
        opened: asyncio.Future[None] = asyncio.ensure_future(self._serve())
        return opened

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", self.port, limit=1 << 20)
        async with server:
            await server.serve_forever()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._controller, limit=1 << 20)
        ways = [
            asyncio.create_task(self._one_way(reader, back)),
            asyncio.create_task(self._one_way(there, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        back.close()
        writer.close()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = b""
        while line := await reader.readline():
            kind = self._kind()
            if kind == "break":
                return
            if kind == "lose":
                continue
            if kind == "swap" and not held:
                held = line
                continue
            if kind == "flip":
                damaged = bytearray(line)
                damaged[self._draw.randrange(len(line))] ^= 1 << self._draw.randrange(8)
                line = bytes(damaged)
            writer.write(line * (2 if kind == "twice" else 1) + held)
            held = b""

    def _kind(self) -> str | None:
        self._lines += 1
        left = [kind for kind, times in self.done.items() if not times]
        if left and self._lines % EVERY == 0:  # each kind happens, whatever is drawn
            self.done[left[0]] += 1
            return left[0]
        at = self._draw.random()
        for kind, share in LIKELIHOOD.items():
            if at < share:
                self.done[kind] += 1
                return kind
            at -= share
        return None


@pytest.mark.repeat  # broken lines are in `tests/control/test_controller.py`
def test_whatever_connections_do_the_run_ends_with_the_same_bits(scene, clean):
    seed = random.SystemRandom().randrange(10**6)
    proxy = BadProxy(seed)
    with asyncio.Runner() as runner:

        async def free_port() -> int:
            server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
            port: int = server.sockets[0].getsockname()[1]
            server.close()
            return port

        proxy.port = runner.run(free_port())

    def agents(run: RunFolder) -> Remote:
        return Remote(run, address=lambda address: f"127.0.0.1:{proxy.port}")

    run = control(scene, f"bad-{seed}", SETTINGS, make_agents=agents, beside=proxy.serve)
    assert all(proxy.done.values()), proxy.done
    assert run.finished.outcome == "finished", f"seed {seed}: {run.story}"
    assert run.digest == clean.digest, f"seed {seed}"
    assert run.samples == clean.samples
    assert not run.of(log.WorkerLost), f"seed {seed}: {run.of(log.WorkerLost)}"
