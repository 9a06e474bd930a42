"""Agents and workers that do not exist, answering the controller's core under a virtual clock.

The core is the one that `paceline run` uses. It decides on messages alone, so it cannot tell these
agents from real ones: they are told to start, interrupt, join and kill workers, and answer with
what real ones say, after the seconds that `costs.py` gives for the real number of ranks.

What is reduced, so that a month takes seconds:

- the core sees a few nodes with one rank each; each stands for an equal, connected part of the
  cluster (with very few nodes, for a part of one). A fault of any node of the part is one of its
  rank. Two nodes of one part that fail at the same moment are one failure to the core, and two
  machines to the spares;
- steps that nothing disturbs are not said one by one, only the last before a failure.

Leaves out: the time of the core and its journal themselves (measured elsewhere, `benchmarks/`), and
traffic between controller and agents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from paceline.control import messages as say
from paceline.control.core import decide
from paceline.control.slots import Phase as WorkPhase
from paceline.control.stalls import ANSWER_S
from paceline.control.state import (
    Action,
    AgentJoined,
    AgentLost,
    Begin,
    Clock,
    Happening,
    KillAgent,
    Record,
    Send,
    StartAgent,
    Tick,
)
from paceline.record import events as log
from paceline.simulation.costs import Phase
from paceline.simulation.failures import Fault
from paceline.simulation.goodput import Ledger, Part
from paceline.simulation.machines import Machines
from paceline.simulation.rhythm import train
from paceline.simulation.scene import Outcome, Scene, new_state

_BY_HAND_S = 1800.0
"""Until a person starts a run again that gave up. A guess."""

_AGENT_START_S = 1.0
"""Until an agent is back on a node of the part that is well. A guess."""


_LOOK_S = 0.3
"""Tracebacks may take so long (a guess)."""

_AGAIN_S = 2.0
"""Between two reports of a worker that stands still. A guess."""

_HUNG_IN = WorkPhase.BACKWARD

_CALM = (say.Met, say.Restored, say.StepDone)
"""After which nothing new is waited for."""


@dataclass(slots=True)
class _Worker:
    """A process that is not there."""

    node: int
    generation: int = 0
    alive: bool = True
    hangs: bool = False
    holds_state: bool = False


def simulate(scene: Scene, faults: Sequence[Fault], rng: np.random.Generator) -> Outcome:
    """One run from its start to the horizon."""
    world = _World(scene, faults, rng)
    world.run()
    return world.outcome


class _World:
    """The run as it really goes, beside what the core knows of it."""

    def __init__(self, scene: Scene, faults: Sequence[Fault], rng: np.random.Generator) -> None:
        self.scene = scene
        self.faults = faults
        self.rng = rng
        self.env: Any = simpy.Environment()
        self.num_parts = min(scene.representatives, scene.num_ranks)
        self.machines = Machines(scene.num_spares, scene.repair_s)
        self.ledger = Ledger()
        self.outcome = Outcome(self.ledger)
        self.state = new_state(self.scene, num_parts=self.num_parts, first_generation=1)
        self.workers: dict[int, _Worker] = {}
        self.era = 0  # counts runs: what was under way for one that gave up is nothing to the next
        self.joined: list[int] = []
        self.part: Part | None = "meet"  # None: training
        self.since_s = 0.0
        self.step = 0
        self.saved_step = 0
        self.told_step = 0
        self.is_broken = True  # somebody of the generation at work is gone
        self.state_is_lost = True  # at first there is none
        self.fault_s: float | None = None
        self.next_tick_s = float("inf")

    # Time, and where it goes.

    def run(self) -> None:
        self.env.process(self._fail())
        self._feed(Begin())
        self.env.run(until=self.scene.horizon_s)
        self._turn_to(None)
        self.outcome.steps = self.step

    def _turn_to(self, part: Part | None) -> None:
        """From now on time goes to this part; None is training."""
        spent = self.env.now - self.since_s
        if self.part is not None:
            self.ledger.add(self.part, spent)
        else:
            stretch = train(self.scene.rhythm, self.step, spent)
            stretch.enter(self.ledger, self.scene.rhythm)
            self.step += stretch.steps
            if stretch.committed is not None:
                self.saved_step = stretch.committed
        self.part, self.since_s = part, self.env.now

    def _later(self, delay_s: float, then: Callable[[], None]) -> None:
        """Unless the run has given up until then."""
        era = self.era

        def happen(_: object) -> None:
            if self.era == era:
                then()

        self.env.timeout(delay_s).callbacks.append(happen)

    def _phase_s(self, name: str) -> float:
        return self._drawn_s(self.scene.costs.phases()[name])

    def _drawn_s(self, phase: Phase) -> float:
        seconds = phase.at(self.scene.num_ranks, self.scene.rhythm.step_s)
        if not self.scene.tail:
            return seconds
        return seconds * float(self.rng.lognormal(0.0, self.scene.tail))

    # The core.

    def _feed(self, event: Happening) -> None:
        clock = Clock(monotonic_s=self.env.now, unix_s=self.env.now)
        for action in decide(self.state, event, clock):
            self._act(action)
        if self.state.phase == "over":
            self._give_up()
        elif not (isinstance(event, say.Said) and isinstance(event.message, _CALM)):
            self._see_to_a_tick()

    def _see_to_a_tick(self) -> None:
        """The shell ticks all the time; here only when the core waits for a moment."""
        state = self.state
        moments = [
            *state.agents_due_s.values(),
            *state.in_doubt_s.values(),
            *(each.fence_by_s for each in state.workers.values() if each.fence_by_s is not None),
        ]
        if state.form_deadline_s is not None:
            moments.append(state.form_deadline_s)
        if state.symptom is not None:
            moments.append(state.symptom.since_s + state.setup.cause_timeout_s)
        if state.inquiry is not None:
            moments.append(state.inquiry.asked_s + ANSWER_S)
        if not moments or min(moments) >= self.next_tick_s:
            return
        self.next_tick_s = min(moments)
        self._later(max(0.0, self.next_tick_s - self.env.now) + 1e-3, self._tick)

    def _tick(self) -> None:
        self.next_tick_s = float("inf")
        self._feed(Tick())

    def _act(self, action: Action) -> None:
        match action:
            case StartAgent(node):
                self._later(_AGENT_START_S, lambda: self._feed(AgentJoined(node)))
            case KillAgent(node):
                for number, worker in self.workers.items():
                    if worker.node == node and worker.alive:
                        self._end(number)
            case Send(node, message):
                self._obey(node, message)
            case Record(event):
                self._see(event)

    def _see(self, event: log.AnyEvent) -> None:
        match event:
            case log.WorkerLost() if self.part == "detect":
                self._turn_to("fence")
            case log.Recovered():
                self.outcome.num_recoveries += 1
                self.outcome.in_place += event.in_place
                self.outcome.from_checkpoint += event.source in ("checkpoint", "initial")
            case _:
                pass

    def _give_up(self) -> None:
        """The controller has ended the run: a person looks into it and starts it again."""
        self._turn_to("idle")
        self.outcome.num_given_up += 1
        self.era += 1
        self.workers.clear()
        self.is_broken = self.state_is_lost = True
        self._later(_BY_HAND_S, self._start_again)

    def _start_again(self) -> None:
        self._turn_to("meet")
        self.next_tick_s = float("inf")
        self.state = new_state(
            self.scene, num_parts=self.num_parts, first_generation=self.state.generation + 1
        )
        self._feed(Begin())

    # What agents are told.

    def _obey(self, node: int, message: say.ToAgent) -> None:
        match message:
            case say.StartWorker(worker=number, rank=rank):
                self.workers[number] = _Worker(node=node)
                self._feed_later(0.0, number, say.Started(worker=number, pid=number))
                self._make_ready(number, is_spare=rank is None)
            case say.Tell(worker=number, message=say.Join() as join):
                self._join(number, join)
            case say.Tell(worker=number, message=say.Interrupt(generation=generation)):
                if not self.workers[number].hangs:
                    self._say(0.0, number, say.Heard(generation=generation))
            case say.Tell(worker=number, message=say.Abort()):
                self._park(number)
            case say.KillWorker(worker=number):
                self._later(0.0, lambda: self._exit(number, fenced=True))
            case say.Look():
                for number, worker in self.workers.items():
                    if worker.node == node and worker.generation:
                        self._feed_later(_LOOK_S, number, self._seen(number, worker))
            case say.KillWorkers():
                for number in [n for n, each in self.workers.items() if each.node == node]:
                    self._later(0.0, lambda number=number: self._exit(number, fenced=True))  # type: ignore[misc]
            case _:
                pass

    def _feed_later(self, delay_s: float, number: int, event: Happening) -> None:
        """Unless its worker has ended until then."""

        def happen() -> None:
            worker = self.workers.get(number)
            if worker is not None and worker.alive:
                self._feed(event)

        self._later(delay_s, happen)

    def _say(self, delay_s: float, number: int, message: say.FromWorker) -> None:
        generation = self.workers[number].generation
        event = say.Said(worker=number, generation=generation, message=message)
        self._feed_later(delay_s, number, event)

    def _make_ready(self, number: int, *, is_spare: bool) -> None:
        """A process starts once there is a machine for it."""

        def start() -> None:
            if number not in self.workers:
                return  # fenced while it waited
            able = self.machines.enough_at(self.env.now, besides=int(is_spare))
            if able == float("inf"):
                return  # every machine there is trains already
            if able > self.env.now:
                self._later(able - self.env.now, start)
                return
            self._say(self._phase_s("cold_start"), number, say.Ready(host="h", port=1))

        start()

    def _park(self, number: int) -> None:
        worker = self.workers.get(number)
        if worker is None or not worker.alive or worker.hangs:
            return
        parked = say.Parked(applied_step=self.step if worker.holds_state else -1)
        self._say(self._phase_s("fence"), number, parked)

    def _end(self, number: int) -> None:
        """A process is no more, and nobody knows yet."""
        worker = self.workers[number]
        worker.alive = False
        if worker.generation == self.state.generation and self.state.phase in (
            "joining",
            "training",
        ):
            self.is_broken = True

    def _exit(self, number: int, *, fenced: bool) -> None:
        worker = self.workers.get(number)
        if worker is None:
            return
        if worker.alive:
            self._end(number)
        self.workers.pop(number)
        self._feed(say.Exited(worker=number, pid=number, returncode=-9, fenced=fenced))

    # A generation.

    def _join(self, number: int, join: say.Join) -> None:
        if join.rank == 0:
            self.joined = []
        self.workers[number].generation = join.generation
        self.joined.append(number)
        if len(self.joined) == self.num_parts:
            self.is_broken = not all(self.workers[n].alive for n in self.joined)
            if not self.is_broken and not any(self.workers[n].hangs for n in self.joined):
                self._gather(join.generation)

    def _in_generation(self, generation: int, then: Callable[[], None]) -> Callable[[], None]:
        """Only as long as this generation is whole."""

        def happen() -> None:
            if not self.is_broken and generation == self.state.generation:
                then()

        return happen

    def _gather(self, generation: int) -> None:
        """Wait until there are as many machines as ranks, then meet."""
        able = self.machines.enough_at(self.env.now)
        if able > self.env.now:
            self._turn_to("idle")
            again = self._in_generation(generation, lambda: self._gather(generation))
            self._later(able - self.env.now, again)
            return
        self._turn_to("meet")
        met = self._in_generation(generation, lambda: self._met(generation))
        self._later(self._phase_s("meet"), met)

    def _met(self, generation: int) -> None:
        self._turn_to("state")
        self._all_say(lambda _: say.Met(world_size=self.num_parts, backend="simulated"))
        is_copied = self._has_live_state()
        seconds = self._phase_s("state" if is_copied else "reload")
        restored = self._in_generation(generation, lambda: self._restored(generation, is_copied))
        self._later(seconds, restored)

    def _has_live_state(self) -> bool:
        holds = any(self.workers[n].holds_state for n in self.joined)
        return holds and not self.state_is_lost and self.scene.tier != "checkpoint"

    def _restored(self, generation: int, is_copied: bool) -> None:
        back_to = self.saved_step
        if is_copied:
            back_to = self.step
            if self.scene.tier == "memory":
                back_to -= self.step % self.scene.memory_every
            back_to = max(back_to, self.saved_step)
        self.ledger_rolls_back(back_to)
        source: say.Source = "checkpoint" if back_to else "initial"
        if is_copied:
            source = "memory" if self.scene.tier == "memory" else "replica"

        def restored(number: int) -> say.FromWorker:
            own = is_copied and self.workers[number].holds_state
            return say.Restored(
                first_step=back_to + 1,
                checkpoint=None if is_copied else "newest",
                refused=[],
                source="own" if own else source,
            )

        self._all_say(restored)
        for number in self.joined:
            self.workers[number].holds_state = True
        self.state_is_lost = False
        self._turn_to("degraded")
        first = self._in_generation(generation, lambda: self._step_again(generation))
        self._later(self._phase_s("first_step"), first)

    def ledger_rolls_back(self, back_to: int) -> None:
        """Steps after this one are repeated."""
        if self.step > back_to:
            self.ledger.lose((self.step - back_to) * self.scene.rhythm.step_s)
        self.step = self.told_step = back_to

    def _step_again(self, generation: int) -> None:
        self._turn_to(None)
        done = self._in_generation(generation, self._first_step_done)
        self._later(self.scene.rhythm.whole_step_s, done)

    def _first_step_done(self) -> None:
        if self.fault_s is not None:
            self.outcome.downtimes_s.append(self.env.now - self.fault_s)
            self.fault_s = None
        self._say_steps(self.step + 1)

    def _say_steps(self, step: int) -> None:
        self.told_step = step
        self._all_say(lambda _: say.StepDone(step=step, loss=1.0, tokens_per_s=1.0, unit="tokens"))

    def _all_say(self, message: Callable[[int], say.FromWorker]) -> None:
        for number in self.joined:
            worker = self.workers.get(number)
            if worker is not None and worker.alive:
                said = message(number)
                self._feed(say.Said(worker=number, generation=worker.generation, message=said))

    # Faults.

    def _fail(self) -> Any:
        for fault in self.faults:
            if fault.at_s >= self.scene.horizon_s:
                return
            yield self.env.timeout(max(0.0, fault.at_s - self.env.now))  # sums of times round
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self.outcome.num_faults += 1
        if fault.takes_nodes:
            self.machines.lose(self.env.now, fault.num_nodes)
            self.state_is_lost |= bool(self.rng.random() >= self.scene.covered)
        self.fault_s = self.env.now if self.fault_s is None else self.fault_s
        for part in self.scene.parts_of(fault, self.num_parts):
            self._strike_part(fault, part)

    def _strike_part(self, fault: Fault, part: int) -> None:
        number = self.state.slots[part].worker if part < len(self.state.slots) else None
        if number is None:
            return  # it has nobody, and is being filled
        worker = self.workers.get(number)
        if worker is None or not worker.alive or worker.hangs:
            return
        if not self.is_broken:
            self._turn_to("detect")
            if self.told_step < self.step and self.state.phase == "training":
                self._say_steps(self.step)
        seconds = self.scene.costs.of(fault.kind).at(self.scene.num_ranks, self.scene.rhythm.step_s)
        if fault.kind == "hang":
            worker.hangs = self.is_broken = True
            self._later(seconds, lambda: self._stands_still(number, seconds))
            return
        self._end(number)
        if fault.kind == "process":
            self._later(seconds, lambda: self._exit(number, fenced=False))
        else:
            self._later(seconds, lambda: self._lose_node(number))

    def _stands_still(self, number: int, waited_s: float) -> None:
        """Its agent says so, again and again while it lasts."""
        worker = self.workers.get(number)
        if worker is None or not worker.alive:
            return
        self._feed(say.Stuck(seen=self._seen(number, worker)))
        self._later(_AGAIN_S, lambda: self._stands_still(number, waited_s + _AGAIN_S))

    def _seen(self, number: int, worker: _Worker) -> say.Seen:
        """What its agent sees of it: the one that hangs stands, and the others wait for it."""
        return say.Seen(
            worker=number,
            generation=worker.generation,
            kind="stopped" if worker.hangs else "waiting",
            is_certain=worker.hangs,
            phase=_HUNG_IN,
            step=self.step + 1,
            micro_batch=0,
            waited_s=0.0,
            limit_s=None,
            is_late=worker.hangs,
            in_collective=not worker.hangs,
            stacks="",
        )

    def _lose_node(self, number: int) -> None:
        """A machine is gone with its agent. Its part has others, whose agents and spares live on,
        so to the core an agent is lost only where no spare is beside the worker."""
        worker = self.workers.get(number)
        if worker is None:
            return
        beside = [n for n, w in self.workers.items() if w.node == worker.node and n != number]
        if beside:
            self._exit(number, fenced=False)
            return
        self.workers.pop(number)
        self._feed(AgentLost(worker.node))
