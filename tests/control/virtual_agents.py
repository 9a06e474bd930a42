"""Agents and workers that are not there, under a virtual clock, with faults, delays and doubles.

They keep to what real ones do: a worker that was told to join meets the others of its generation,
says what it restored, steps and completes; interrupted, it parks; killed, its end is told. Only the
network between them and the controller misbehaves, and the things that fail.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.control import messages as say
from paceline.control import state as st
from paceline.control.core import decide
from paceline.control.slots import Phase
from paceline.record import events as log

LIMIT_S = 3.0
"""What the agents have learned that a phase may take."""


LEASE_S = 2.0
"""After which workers that hear nothing of their controller end themselves."""


@dataclass(slots=True)
class Process:
    """A worker as it really is."""

    node: int
    alive: bool = True
    hangs: bool = False
    generation: int = 0
    rank: int = -1
    applied: int = -1
    """Last step it holds the state of; -1 is none."""

    is_parked: bool = False
    is_ready: bool = False
    has_to_meet: bool = False
    moved_s: float = 0.0
    """When it last came further."""

    heard: int = 0
    """The last generation that it knows is over."""

    crashes_at: int | None = None
    """Step in which it raises."""

    @property
    def phase(self) -> str:
        """In the words of its slot."""
        if not self.is_ready:
            return "building"
        if self.is_parked or not self.generation:
            return "parked"
        return "joining" if self.has_to_meet else "backward"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at a moment."""

    at_s: float
    kind: str
    """`kill`, `hang`, `crash` (an exception), `node`, `spare`, `partition` (a node that is well
    and cannot be reached), `controller` (a new one takes over)."""

    target: int


@dataclass(slots=True)
class World:
    """A run, played until it is over or the clock has run out."""

    setup: st.Setup
    faults: list[Fault]
    seed: int = 0
    doubles: float = 0.0
    """Share of the messages that arrive twice, the second time later."""

    at_once: bool = False
    """Whether every message arrives a second time at once."""

    is_slow: bool = True
    """Whether delays are drawn; otherwise messages keep their order."""

    events: list[log.AnyEvent] = field(default_factory=list)
    joins: list[tuple[int, int, int]] = field(default_factory=list)
    """Generation, rank and worker of every Join, in order."""

    fenced: set[int] = field(default_factory=set)
    """Workers that the controller told to die."""

    agents: set[int] = field(default_factory=set)
    processes: dict[int, Process] = field(default_factory=dict)
    doubted: dict[int, float] = field(default_factory=dict)
    """Rank -> until when a worker that cannot be reached may still have it."""

    unreachable: set[int] = field(default_factory=set)
    history: list[tuple[Any, st.Clock]] = field(default_factory=list)
    """All that the core was fed."""

    checkpoint: int = 0
    now: float = 0.0
    num_fed: int = 0
    on_feed: Callable[["World"], None] = lambda _: None
    state: st.State = field(init=False)
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.state = st.State(setup=self.setup)
        self._random = random.Random(self.seed)

    def play(self, limit_s: float = 3600.0) -> None:
        """From the first moment to the last."""
        self.feed(st.Begin())
        for fault in self.faults:
            self.later(fault.at_s, lambda fault=fault: self.strike(fault))  # type: ignore[misc]
        self.later(1.0, self.tick)
        while self._queue and self.state.phase != "over":
            self.now, _, then = heapq.heappop(self._queue)
            if self.now > limit_s:
                return
            then()

    def tick(self) -> None:
        self.feed(st.Tick())
        self.later(1.0, self.tick)

    def later(self, delay_s: float, then: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._order, then))

    # The controller.

    def feed(self, event: st.Happening) -> None:
        self.num_fed += 1
        clock = st.Clock(monotonic_s=self.now, unix_s=1e9 + self.now)
        self.history.append((event, clock))
        actions = decide(self.state, event, clock)
        self.on_feed(self)
        for action in actions:
            self.act(action)

    def act(self, action: st.Action) -> None:
        match action:
            case st.Record(event):
                self.events.append(event)
            case st.StartAgent(node):
                self.later(self.delay(0.5), lambda: self.agent_joins(node))
            case st.KillAgent(node):
                self.lose_agent(node)
            case st.Send(node, message):
                self.note(message)
                if node in self.agents:
                    self.later(self.delay(0.01), lambda: self.obey(node, message))

    def note(self, message: say.ToAgent) -> None:
        match message:
            case say.KillWorker(worker=number):
                self.fenced.add(number)
            case say.KillWorkers():
                self.fenced.update(self.processes)
            case say.Tell(worker=number, message=say.Join(generation=generation, rank=rank)):
                assert self.now >= self.doubted.get(rank, 0.0), "a rank in doubt was given away"
                self.joins.append((generation, rank, number))
            case _:
                pass

    def delay(self, seconds: float) -> float:
        return seconds * (self._random.uniform(0.2, 3.0) if self.is_slow else 1.0)

    def hear(self, node: int, event: Any, delay_s: float | None = None) -> None:
        """An agent's message arrives, unless its connection is gone by then."""

        def arrive() -> None:
            if node in self.agents:
                self.feed(event)
                if self.at_once:
                    self.feed(event)

        seconds = self.delay(0.01) if delay_s is None else delay_s
        self.later(seconds, arrive)
        if self._random.random() < self.doubles:
            self.later(seconds + self._random.uniform(0, 5.0), arrive)

    def says(self, number: int, message: say.FromWorker, delay_s: float | None = None) -> None:
        process = self.processes[number]
        said = say.Said(worker=number, generation=process.generation, message=message)
        self.hear(process.node, said, delay_s)

    # Agents.

    def agent_joins(self, node: int) -> None:
        if node in self.unreachable:
            self.later(1.0, lambda: self.agent_joins(node))
        elif node not in self.agents:
            self.agents.add(node)
            self.feed(st.AgentJoined(node))
            self.later(1.5, lambda: self.look_out(node))

    def lose_agent(self, node: int) -> None:
        if node in self.unreachable:
            return  # who cannot be reached cannot be killed
        for process in self.processes.values():
            if process.node == node:
                process.alive = False
        if node in self.agents:
            self.agents.discard(node)
            self.later(self.delay(0.05), lambda: self.feed(st.AgentLost(node)))

    def obey(self, node: int, message: say.ToAgent) -> None:
        if node not in self.agents:
            return
        match message:
            case say.StartWorker(worker=number):
                self.processes[number] = Process(node=node, moved_s=self.now)
                self.hear(node, say.Started(worker=number, pid=100 + number))
                self.later(self.delay(0.5), lambda: self.ready(number))
            case say.Tell(worker=number, message=told) if number in self.processes:
                process = self.processes[number]
                if process.alive and not process.hangs:
                    self.tell(number, process, told)
            case say.KillWorker(worker=number):
                self.end(number, -9)
            case say.Look():
                self.look(node)
            case say.KillWorkers():
                for number, process in list(self.processes.items()):
                    if process.node == node:
                        self.end(number, -9)
            case _:
                pass

    def end(self, number: int, returncode: int) -> None:
        process = self.processes.get(number)
        if process is None or not process.alive:
            return
        process.alive = False
        exited = say.Exited(
            worker=number, pid=100 + number, returncode=returncode, fenced=number in self.fenced
        )
        # The kernel tells of the end after everything that the worker had said.
        self.hear(process.node, exited, 0.05 if self.is_slow else 0.02)

    def look_out(self, node: int) -> None:
        """An agent says, again and again, which of its workers have stood still for too long."""
        if node not in self.agents:
            return
        for number, process in self.processes.items():
            if process.node == node and process.alive and self.is_late(process):
                stuck = say.Stuck(seen=self.sight(number, process))
                self.hear(node, stuck)
        self.later(1.5, lambda: self.look_out(node))

    def is_late(self, process: Process) -> bool:
        """Whoever waits for orders may do so for ever."""
        return process.phase != "parked" and self.now - process.moved_s > LIMIT_S

    def look(self, node: int) -> None:
        for number, process in self.processes.items():
            if process.node == node and process.alive:
                seen = self.sight(number, process)
                self.hear(node, seen, self.delay(0.3))

    def sight(self, number: int, process: Process) -> say.Seen:
        return say.Seen(
            worker=number,
            generation=process.generation,
            kind="stopped" if process.hangs else "waiting",
            is_certain=process.hangs,
            phase=Phase[process.phase.upper()],
            step=process.applied + 1,
            micro_batch=0,
            waited_s=self.now - process.moved_s,
            limit_s=None if process.phase == "parked" else LIMIT_S,
            is_late=self.is_late(process),
            in_collective=not process.hangs,
        )

    # Workers.

    def ready(self, number: int) -> None:
        process = self.processes[number]
        if process.alive and not process.hangs:
            process.is_ready = True
            self.says(number, say.Ready(host="h", port=number + 1))

    def tell(self, number: int, process: Process, told: say.ToWorker) -> None:
        match told:
            case say.Join(generation=generation, rank=rank):
                process.generation, process.rank, process.is_parked = generation, rank, False
                process.has_to_meet, process.moved_s = True, self.now
                self.later(0.0, lambda: self.meet(generation))
            case say.Interrupt(generation=generation) if generation == process.generation:
                process.heard = generation
                self.says(number, say.Heard(generation=generation))
            case say.Abort(generation=generation) if generation == process.generation:
                self.check_that_all_heard(generation)
                self.later(self.delay(0.02), lambda: self.park(number, generation))
            case say.StopAtBoundary():
                self.later(0.01, lambda: self.complete(number, "interrupted"))
            case _:
                pass

    def check_that_all_heard(self, generation: int) -> None:
        """No rank that can still act on what it receives is left out of an interruption."""
        for number, process in self.processes.items():
            is_at_work = process.alive and process.generation == generation
            is_out = process.is_parked or number in self.fenced or process.node not in self.agents
            if is_at_work and not is_out:
                assert process.heard >= generation, f"worker {number} has not heard of the end"

    def park(self, number: int, generation: int) -> None:
        process = self.processes[number]
        if process.alive and not process.hangs and process.generation == generation:
            process.is_parked = True
            self.says(number, say.Parked(applied_step=process.applied))

    def members(self, generation: int) -> list[int] | None:
        """Everybody of a generation, as long as it is whole."""
        ready = [
            number
            for number, each in self.processes.items()
            if each.generation == generation
            and each.alive
            and not each.hangs
            and not each.is_parked
        ]
        return ready if len(ready) == self.setup.num_ranks else None

    def meet(self, generation: int) -> None:
        everyone = self.members(generation)
        if everyone is None:
            return
        newest = max(self.processes[number].applied for number in everyone)
        step = newest if newest >= 0 else self.checkpoint
        for number in everyone:
            self.says(number, say.Met(world_size=len(everyone), backend="gloo"))
            source = "own" if self.processes[number].applied >= 0 else "replica"
            if newest < 0:
                source = "checkpoint" if step else "initial"
            restored = say.Restored(
                first_step=step + 1,
                checkpoint=None,
                refused=[],
                source=source,  # type: ignore[arg-type]
            )
            self.says(number, restored, 0.2)
            process = self.processes[number]
            process.applied, process.has_to_meet, process.moved_s = step, False, self.now
        self.later(0.3, lambda: self.step(generation, step + 1))

    def step(self, generation: int, step: int) -> None:
        """All of a generation or nobody: the vote before it is applied."""
        everyone = self.members(generation)
        if everyone is None:
            return
        if step > self.setup.num_steps:
            for number in everyone:
                self.complete(number, "finished")
            return
        raises = [n for n in everyone if self.processes[n].crashes_at == step]
        if raises:
            self.raise_in(raises[0])
            return
        for number in everyone:
            self.processes[number].applied = step
            self.processes[number].moved_s = self.now
            done = say.StepDone(step=step, loss=1.0, tokens_per_s=1.0, unit="tokens")
            self.says(number, done)
        if step % 5 == 0:
            self.checkpoint = step
        self.later(self.delay(0.2), lambda: self.step(generation, step + 1))

    def raise_in(self, number: int) -> None:
        process = self.processes[number]
        process.is_parked, process.crashes_at = True, None
        crashed = say.Crashed(
            kind="ValueError",
            message="bad",
            where="line 1",
            parks=True,
            retry=True,
            exit_code=4,
            step=process.applied + 1,
            samples=[],
        )
        self.says(number, crashed, 0.01)

    def complete(self, number: int, outcome: str) -> None:
        process = self.processes[number]
        if not process.alive or process.is_parked:
            return
        record = say.Completed(
            outcome=outcome,  # type: ignore[arg-type]
            step=process.applied,
            saved_step=process.applied,
            world_size=self.setup.num_ranks,
            state_digest="abc",
            held_out_loss=1.0,
            baseline_bytes=1,
            peak_bytes=2,
        )
        self.says(number, record, 0.01)
        self.later(0.2, lambda: self.end(number, 0))

    # Faults.

    def strike(self, fault: Fault) -> None:
        ranked = [slot.worker for slot in self.state.slots if slot.worker in self.processes]
        spares = [n for n, each in self.processes.items() if each.alive and n not in ranked]
        among = spares if fault.kind == "spare" else ranked
        if fault.kind == "controller":
            self.feed(st.TookOver(away_s=0.5))
        elif fault.kind == "partition":
            self.cut_off(fault.target % self.setup.num_nodes)
        elif fault.kind == "node":
            self.lose_agent(fault.target % self.setup.num_nodes)
        elif among:
            number = among[fault.target % len(among)]
            assert number is not None
            self.strike_worker(fault.kind, number)

    def cut_off(self, node: int) -> None:
        """Nothing passes any more; its workers go on until the lease is over."""
        if node not in self.agents:
            return
        self.agents.discard(node)
        self.unreachable.add(node)
        mine = [n for n, each in self.processes.items() if each.node == node and each.alive]
        self.later(LEASE_S, lambda: self.end_of_lease(node, mine))

        def known() -> None:
            for rank, slot in enumerate(self.state.slots):
                worker = self.state.workers.get(slot.worker if slot.worker is not None else -1)
                if worker is not None and worker.node == node and worker.generation:
                    self.doubted[rank] = self.now + 2 * LEASE_S
            self.feed(st.AgentLost(node, in_doubt_s=2 * LEASE_S))

        self.later(0.5, known)

    def end_of_lease(self, node: int, mine: list[int]) -> None:
        for number in mine:
            self.processes[number].alive = False
        self.unreachable.discard(node)

    def strike_worker(self, kind: str, number: int) -> None:
        process = self.processes[number]
        if kind in ("kill", "spare"):
            self.end(number, -9)
        elif kind == "hang" and process.alive:
            process.hangs = True
        elif kind == "crash":
            process.crashes_at = process.applied + 1
