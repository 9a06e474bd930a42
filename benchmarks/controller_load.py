"""The controller under thousands of agents: its share of a core, false alarms, deaths noticed.

    .venv/bin/python benchmarks/controller_load.py [--agents 2048] [--minutes 1]

The product's controller with its journal, and real TCP connections of as many agents as asked, each
a node of one rank, from two processes that only pretend to have workers: every agent beats five
times a second, answers orders as workers would, and its rank finishes a step every `--step`
seconds. After a clean time in which any lost node or worker is a false alarm, workers die and their
agents say so, sockets are closed, and then agents fall silent without closing, one after the other;
each time is from the deed to the controller's word. A dead worker's recovery is timed as well: to
the moment when all ranks, with a new one among them, have their state back.
"""

import argparse
import asyncio
import heapq
import multiprocessing
import os
import random
import resource
import secrets
import selectors
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from figures import machine

from paceline.control import messages as say
from paceline.control.agent_connection import BEAT
from paceline.control.controller import AgentAddress, Controller
from paceline.control.failover import Memory, snapshot
from paceline.control.frames import Report, open_order, seal
from paceline.control.heartbeats import BEAT_EVERY_S
from paceline.control.journal import Journal
from paceline.control.reliable_link import Inbox, Outbox
from paceline.control.state import Setup, State
from paceline.record import events as log

NUM_GENERATORS = 2


# The agents that are not there.


@dataclass
class Pretender:
    """One agent's connection, and its one worker."""

    node: int
    line: socket.socket
    step_s: float
    worker: int = -1
    generation: int = 0
    unread: bytes = b""
    silent: bool = False
    outbox: Outbox[say.FromAgent] = field(default_factory=Outbox)
    inbox: Inbox = field(default_factory=Inbox)

    def send(self, message: say.FromAgent) -> None:
        number, before = self.outbox.add(message)
        self.frame(message, number, before)

    def frame(self, message: say.FromAgent, number: int = 0, before: int = 0) -> None:
        report = Report(number=number, before=before, heard=self.inbox.last, message=message)
        self.line.sendall(seal(report))

    @property
    def step(self) -> int:
        """The last one finished: all ranks finish one together, as if they voted."""
        return int(time.monotonic() / self.step_s)

    def says(self, message: say.FromWorker) -> None:
        self.send(say.Said(worker=self.worker, generation=self.generation, message=message))

    def obey(self, line: bytes) -> bool:
        """As agent and worker would; False when it is to leave."""
        order = open_order(line)
        self.outbox.heard(order.heard)
        if order.number and not self.inbox.take(order.number, order.before):
            return True
        match order.message:
            case say.StartWorker(worker=worker):
                self.worker, self.generation = worker, 0
                self.send(say.Started(worker=worker, pid=1))
                self.says(say.Ready(host="127.0.0.1", port=1))
            case say.Tell(message=say.Join() as join):
                self.generation = join.generation
                self.says(say.Met(world_size=join.world_size, backend="none"))
                self.says(
                    say.Restored(
                        first_step=self.step + 1, source="own", checkpoint=None, refused=[]
                    )
                )
            case say.Tell(message=say.Interrupt(generation=generation)):
                self.says(say.Heard(generation=generation))
            case say.Tell(message=say.Abort()):
                self.says(say.Parked(applied_step=self.step))
            case say.Leave():
                return False
        return True


@dataclass
class Crowd:
    """Many agents in one process: one timer for each, one selector for all."""

    address: AgentAddress
    step_s: float
    agents: dict[int, Pretender] = field(default_factory=dict)
    due: list[tuple[float, int]] = field(default_factory=list)
    held: bool = False
    """Whether no step can be finished, as some rank's agent is silent and its ranks stopped."""

    chosen: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def join(self, node: int) -> None:
        host, _, port = self.address.controller.rpartition(":")
        line = socket.create_connection((host, int(port)))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        agent = self.agents[node] = Pretender(node, line, self.step_s)
        agent.frame(
            say.AgentReady(
                node=node,
                token=self.address.token,
                pid=os.getpid(),
                incarnation=secrets.token_hex(8),
            )
        )
        self.chosen.register(line, selectors.EVENT_READ, agent)
        heapq.heappush(self.due, (time.monotonic() + random.random() * BEAT_EVERY_S, node))

    def run(self, pipe: Pipe) -> None:
        self.chosen.register(pipe, selectors.EVENT_READ, None)
        next_step = (int(time.monotonic() / self.step_s) + 1) * self.step_s
        while True:
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                at, node = heapq.heappop(self.due)
                agent = self.agents.get(node)
                if agent is not None and not agent.silent:
                    agent.line.sendall(BEAT)
                    heapq.heappush(self.due, (max(at + BEAT_EVERY_S, now), node))
            if now >= next_step:
                next_step += self.step_s
                self.finish_step()
            wait = max(0.0, min(self.due[0][0] if self.due else now + 0.1, next_step) - now)
            for key, _ in self.chosen.select(wait):
                if key.data is None:
                    if not self.told(pipe.recv(), pipe):
                        return
                else:
                    self.hear(key.data)

    def finish_step(self) -> None:
        if self.held:
            return
        for agent in self.agents.values():
            if agent.generation and not agent.silent:
                agent.says(say.StepDone(step=agent.step, loss=1.0, tokens_per_s=1.0, unit="tokens"))

    def told(self, order: tuple[str, int], pipe: Pipe) -> bool:
        what, node = order
        if what == "join":
            self.join(node)
        elif what == "close":
            agent = self.agents.pop(node)
            self.chosen.unregister(agent.line)
            at = time.monotonic()
            agent.line.close()
            pipe.send((node, at))
        elif what == "die":
            agent, at = self.agents[node], time.monotonic()
            agent.generation = 0
            agent.send(say.Exited(worker=agent.worker, pid=1, returncode=-9, fenced=False))
            pipe.send((node, at))
        elif what == "silence":
            self.agents[node].silent = True
            pipe.send((node, time.monotonic()))
        elif what in ("hold", "go"):
            self.held = what == "hold"
        return what != "end"

    def hear(self, agent: Pretender) -> None:
        try:
            received = agent.line.recv(1 << 16)
        except OSError:
            received = b""
        if agent.silent and received:
            return
        *lines, agent.unread = (agent.unread + received).split(b"\n")
        goes_on = bool(received) and all(agent.obey(line) for line in lines)
        if not goes_on:
            self.chosen.unregister(agent.line)
            agent.line.close()
            if self.agents.get(agent.node) is agent:
                del self.agents[agent.node]


def generate(address: AgentAddress, nodes: list[int], step_s: float, pipe: Pipe) -> None:
    """A process full of agents."""
    crowd = Crowd(address, step_s)
    for node in nodes:
        crowd.join(node)
    crowd.run(pipe)


# The controller, and what is done to it.


@dataclass
class Load:
    """The agents' processes."""

    num_agents: int
    step_s: float
    pipes: list[Pipe] = field(default_factory=list)
    processes: list[multiprocessing.Process] = field(default_factory=list)
    lost_at: dict[int, float] = field(default_factory=dict)
    """When the controller gave up a node, or the worker on it."""

    begun_at: list[float] = field(default_factory=list)
    """When all ranks of a generation had their state, one after the other."""

    started: set[int] = field(default_factory=set)

    closed: set[int] = field(default_factory=set)
    """Nodes whose agent has ended and is not started again yet."""

    kills_surely: bool = True

    def start(self, address: AgentAddress) -> None:
        """The controller wants an agent on a node: the first time all come, later that one."""
        self.closed.discard(address.node)
        self.started.add(address.node)
        if self.processes:
            self.pipes[address.node % NUM_GENERATORS].send(("join", address.node))
        elif len(self.started) == self.num_agents:
            context = multiprocessing.get_context("spawn")
            for part in range(NUM_GENERATORS):
                ours, theirs = context.Pipe()
                nodes = list(range(part, self.num_agents, NUM_GENERATORS))
                process = context.Process(
                    target=generate, args=(address, nodes, self.step_s, theirs), daemon=True
                )
                process.start()
                self.pipes.append(ours)
                self.processes.append(process)

    def kill(self, node: int, pid: int) -> None:
        """The controller gave a node up."""
        self.lost_at.setdefault(node, time.monotonic())

    def is_gone(self, node: int, pid: int) -> bool:
        return node in self.closed

    def note(self, event: log.AnyEvent) -> None:
        """The controller writes an event."""
        if isinstance(event, log.WorkerLost):
            self.lost_at.setdefault(event.node, time.monotonic())
        elif isinstance(event, log.TrainingStarted):
            self.begun_at.append(time.monotonic())

    async def do(self, what: str, node: int) -> float:
        """Have something happen to an agent; seconds until the controller knew."""
        self.lost_at.pop(node, None)
        if what == "close":
            self.closed.add(node)
        for each in self.pipes:
            each.send(("hold", 0))
        pipe = self.pipes[node % NUM_GENERATORS]
        pipe.send((what, node))
        while not pipe.poll():
            await asyncio.sleep(0.001)
        _, at = pipe.recv()
        until = time.monotonic() + 120
        while node not in self.lost_at and time.monotonic() < until:
            await asyncio.sleep(0.001)
        for each in self.pipes:
            each.send(("go", 0))
        return self.lost_at.get(node, float("inf")) - at


def line_of(values: list[float]) -> str:
    """p50, p95, p99 and the largest, with n."""
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return (
        f"p50 {statistics.median(ordered):.3f} s, p95 {at(0.95):.3f} s, p99 {at(0.99):.3f} s, "
        f"largest {ordered[-1]:.3f} s, n = {len(ordered)}"
    )


async def measure(options: argparse.Namespace, events: log.EventLog, folder: Path) -> None:
    """Start, watch, kill."""
    load = Load(options.agents, options.step)
    setup = Setup(
        num_nodes=options.agents,
        ranks_per_node=1,
        num_steps=10**9,
        max_restarts=10**9,
        grace_s=5.0,
        versions={},
        resumed=False,
        layout="pretended",
        heartbeat_s=options.heartbeat,
        agent_timeout_s=120.0,
    )
    memory = Memory(state=State(setup=setup), token=secrets.token_hex(16), lines_before=0)
    journal = Journal(folder / "journal")
    journal.begin(snapshot(memory))
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    controller = Controller(
        memory=memory,
        journal=journal,
        listener=listener,
        events=events,
        agents=load,
        lease_s=60.0,
        on_event=load.note,
    )
    running = asyncio.create_task(controller.run())
    state = controller.state
    here_at = 0.0
    while state.phase != "training":
        if running.done():
            raise SystemExit(f"the run ended: {running.result().reason}")
        if not here_at and state.phase != "gathering":
            here_at = time.monotonic()
        await asyncio.sleep(0.01)
    print(f"last agent here -> all ranks have joined, met and have their state: "
          f"{load.begun_at[0] - here_at:.2f} s, n = 1", flush=True)  # fmt: skip
    await asyncio.sleep(2 * options.step)
    print(f"{options.agents} agents at work, a step every {options.step:g} s", flush=True)
    load.lost_at.clear()
    began, cpu = time.monotonic(), time.process_time()
    lags: list[float] = []
    while time.monotonic() - began < 60 * options.minutes:
        asked = time.monotonic()
        await asyncio.sleep(0.05)
        lags.append(time.monotonic() - asked - 0.05)
    share = (time.process_time() - cpu) / (time.monotonic() - began)
    print(f"clean for {options.minutes:g} min: {share:.1%} of a core, {len(load.lost_at)} ranks "
          f"lost by mistake; its event loop was late by {line_of(lags)}", flush=True)  # fmt: skip
    draw = random.Random(0)
    deeds = {
        "die": ("worker dead, its agent says so", options.deaths),
        "close": ("socket closed", options.kills),
        "silence": (f"silent, limit {options.heartbeat:g} s", options.silences),
    }
    for what, (name, num) in deeds.items():
        taken, recovered = [], []
        for node in draw.sample(range(options.agents), num):
            num_begun = len(load.begun_at)
            taken.append(await load.do(what, node))
            while len(load.begun_at) == num_begun or state.phase != "training":
                await asyncio.sleep(0.01)
            recovered.append(load.begun_at[num_begun] - load.lost_at[node])
            await asyncio.sleep(options.step)
        if taken:
            print(f"{name} -> known: {line_of(taken)}", flush=True)
            print(f"known -> all ranks have their state again: {line_of(recovered)}", flush=True)
    for pipe in load.pipes:
        pipe.send(("end", 0))
    running.cancel()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"memory of the controller at its fullest: {peak:.0f} MiB")


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=1.0, help="without any fault")
    parser.add_argument("--step", type=float, default=5.0, help="seconds between steps")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="limit in seconds")
    parser.add_argument("--deaths", type=int, default=20, help="workers that die")
    parser.add_argument("--kills", type=int, default=20, help="sockets closed")
    parser.add_argument("--silences", type=int, default=5, help="agents that fall silent")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"measured; {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        events = log.EventLog(folder / "events.jsonl")
        try:
            asyncio.run(measure(options, events, folder))
        finally:
            events.close()


if __name__ == "__main__":
    main()
