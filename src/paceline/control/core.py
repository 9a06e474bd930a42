"""The controller's mind: `decide(state, event, clock) -> actions`, and nothing else.

No clock, no socket, no file: the same events make the same state and the same actions. The shell in
`controller.py` feeds it what happened and carries out what it answers; tests and simulations run
this very code.

A worker is lost -> the others are interrupted and park with what they hold -> the empty slots get
spares or new processes -> all join the next generation, and bring each other to the newest step.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

import msgspec

from paceline.control import messages as say
from paceline.control import policy, suspicion, world
from paceline.control.policy import Cause, Verdict, note
from paceline.control.state import (
    Action,
    AgentJoined,
    AgentLost,
    Begin,
    Clock,
    Failure,
    Happening,
    KillAgent,
    Outcome,
    Record,
    Send,
    Slot,
    StartAgent,
    State,
    StopWanted,
    Symptom,
    Tick,
    TookOver,
    Worker,
)
from paceline.parallel.layout import Layout
from paceline.parallel.shrink import part_of
from paceline.record import events as log
from paceline.spec.faults import parse_fault

_SPARE_ATTEMPTS = 3
"""Spares that may be lost for each one that is kept, before no more are started. A guess: a spare
that cannot live says so in its first seconds."""


@dataclass(slots=True)
class _Turn:
    """One decision in the making: the moment, and the actions so far."""

    clock: Clock
    actions: list[Action] = field(default_factory=list)

    def record(self, event: log.AnyEvent) -> None:
        self.actions.append(Record(event))

    def send(self, node: int, message: say.ToAgent) -> None:
        self.actions.append(Send(node, message))

    def send_all(self, nodes: Iterable[int], message: say.ToAgent) -> None:
        for node in sorted(nodes):
            self.send(node, message)


def decide(state: State, event: Happening, clock: Clock) -> list[Action]:
    """Advance the state, and say what to do now.

    Never raises for anything an agent can send: what does not fit the state, is of a worker that is
    no more, or of an older generation, changes nothing.
    """
    turn = _Turn(clock)
    if state.phase == "over":
        return []
    match event:
        case Begin():
            _begin(state, turn)
        case TookOver(away_s):
            _took_over(state, away_s, turn)
        case AgentJoined(node=node):
            state.agents.add(node)
            state.leaving.discard(node)
            state.agents_due_s.pop(node, None)
            _go_on(state, turn)
        case AgentLost():
            _agent_lost(state, event, turn)
        case StopWanted(by):
            _stop_wanted(state, by, turn)
        case Tick():
            _tick(state, turn)
        case say.Started() | say.Exited() | say.Said() | say.FaultDone() | say.Stuck() | say.Seen():
            if event.worker in state.workers:
                _from_agent(state, event, turn)
        case _:
            assert_never(event)
    return turn.actions


def _from_agent(
    state: State,
    event: say.Started | say.Exited | say.Said | say.FaultDone | say.Stuck | say.Seen,
    turn: _Turn,
) -> None:
    worker = state.workers[event.worker]
    match event:
        case say.Started(pid=pid):
            worker.pid = pid
            turn.record(
                log.WorkerStarted(
                    at=turn.clock.unix_s,
                    generation=state.generation,
                    rank=worker.rank,
                    node=worker.node,
                    pid=pid,
                )
            )
        case say.Exited():
            _gone(state, event.worker, event, turn)
        case say.FaultDone():
            turn.record(
                log.FaultInjected(
                    at=turn.clock.unix_s,
                    generation=state.generation,
                    fault=event.fault,
                    rank=worker.rank if worker.rank is not None else -1,
                    pid=event.pid,
                )
            )
            if parse_fault(event.fault).row.end in ("recovers", "stops"):
                state.fault_at = event.monotonic_s
        case say.Said():
            _said(state, event, turn)
        case say.Stuck():
            _stuck(state, event, turn)
        case say.Seen():
            _seen(state, event, turn)


# Beginning, and filling slots.


def _begin(state: State, turn: _Turn) -> None:
    setup = state.setup
    turn.record(
        log.RunStarted(
            at=turn.clock.unix_s,
            generation=state.generation,
            num_ranks=setup.num_ranks,
            num_nodes=setup.num_nodes,
            num_steps=setup.num_steps,
            resumed=setup.resumed,
            layout=setup.layout,
            versions=setup.versions,
        )
    )
    state.generation = setup.first_generation
    state.history.poison.update(setup.skipped)
    state.is_numeric = setup.is_numeric
    for node in range(setup.num_nodes):
        if node not in state.agents:
            _start_agent(state, node, turn)
    _go_on(state, turn)


def _took_over(state: State, away_s: float, turn: _Turn) -> None:
    """Nobody is late for having waited for a controller."""
    state.epoch += 1
    turn.record(
        log.ControllerReplaced(
            at=turn.clock.unix_s,
            generation=state.generation,
            epoch=state.epoch,
            away_s=away_s,
        )
    )
    for node in state.agents_due_s:
        _start_agent(state, node, turn)  # whether or not the last one came to it
    for worker in state.workers.values():
        if worker.fence_by_s is not None:
            worker.fence_by_s += away_s
    if state.form_deadline_s is not None:
        state.form_deadline_s += away_s
    if state.stop_deadline_s is not None:
        state.stop_deadline_s += away_s
    if state.short_since_s is not None:
        state.short_since_s += away_s
    if state.symptom is not None:
        state.symptom = replace(state.symptom, since_s=state.symptom.since_s + away_s)
    state.inquiry = None  # whoever is late says so again


def _go_on(state: State, turn: _Turn) -> None:
    """Whatever can happen next on the way to a generation at work."""
    if state.phase == "gathering":
        if len(state.agents) < state.setup.num_nodes:
            return
        _form_anew(state)
    if state.phase == "clearing":
        if state.workers:
            return
        _form_anew(state)
    if state.phase == "forming":
        _fill_slots(state, turn)
        _shrink_if_short(state, turn)
        if all(_waits(state, slot) for slot in state.slots):
            _join(state, turn)
    if state.phase == "training":
        _keep_spares(state, turn)
        _grow_if_ready(state, turn)


def _start_agent(state: State, node: int, turn: _Turn) -> None:
    turn.actions.append(StartAgent(node))
    state.agents_due_s[node] = turn.clock.monotonic_s + state.setup.agent_timeout_s


def _form_anew(state: State) -> None:
    state.phase = "forming"
    layout = state.split
    state.slots = [Slot() for _ in range(layout.num_ranks if layout else state.setup.num_ranks)]


def _waits(state: State, slot: Slot) -> bool:
    return slot.worker is not None and state.workers[slot.worker].waits


def _fill_slots(state: State, turn: _Turn) -> None:
    """A spare for every empty slot, or else a new process."""
    aside = state.history.set_aside
    for rank, slot in enumerate(state.slots):
        if slot.worker is not None or rank in state.in_doubt_s:
            continue
        home = state.setup.node_of(rank)
        spares = [
            (worker.node in aside, worker.node != home, not worker.waits, number)
            for number, worker in state.workers.items()
            if worker.rank is None and not worker.is_fenced and not worker.leaves
        ]
        if spares:
            slot.worker = min(spares)[-1]
            state.workers[slot.worker].rank = rank
        elif home in state.agents - state.leaving - aside:
            slot.worker = _start(state, home, rank, turn)
        elif free := world.free_nodes(state):
            slot.worker = _start(state, free[0], rank, turn)
        elif home in state.agents - state.leaving:
            slot.worker = _start(state, home, rank, turn)


def _shrink_if_short(state: State, turn: _Turn) -> None:
    """Go on with fewer ranks, when some have been empty for long enough."""
    if state.in_doubt_s or all(slot.worker is not None for slot in state.slots):
        state.short_since_s = None
        return
    if state.short_since_s is None:
        state.short_since_s = turn.clock.monotonic_s
    waited_s = turn.clock.monotonic_s - state.short_since_s
    if waited_s < state.setup.replace_timeout_s:
        return
    layout = world.smaller(state)
    if layout is not None:
        away = sorted(set(range(state.setup.num_nodes)) - state.agents)
        reason = f"node(s) {away} stayed away for {waited_s:.3g} s and no spare is left"
        _resize(state, layout, reason, turn)


def _resize(state: State, layout: Layout, reason: str, turn: _Turn) -> None:
    at, generation = turn.clock.unix_s, state.generation
    world.resize(state, layout)
    state.short_since_s = None
    state.stragglers = None
    state.num_resizes += 1
    turn.record(
        log.WorldChanged(
            at=at,
            generation=generation,
            num_ranks=layout.num_ranks,
            layout=layout.name,
            reason=reason,
        )
    )
    if state.split is not None and not state.is_numeric:
        state.is_numeric = True
        turn.record(
            log.ExactnessChanged(
                at=at,
                generation=generation,
                exactness="numeric",
                reason=f"the batch is added up over {layout.data} data ranks",
                tolerance=state.setup.tolerance,
            )
        )


def _grow_if_ready(state: State, turn: _Turn) -> None:
    """Ask all to leave at a step boundary, once there are processes for a larger world."""
    if state.regroup is not None or state.stop_by is not None:
        return
    layout = world.larger(state)
    if layout is not None:
        _regroup(state, layout, turn, save=False)


def _regroup(state: State, layout: Layout, turn: _Turn, *, save: bool) -> None:
    state.regroup = layout
    _tell_all(state, say.RegroupAtBoundary(generation=state.generation, save=save), turn)


def _leave_wanted(state: State, number: int, turn: _Turn) -> None:
    """A worker will be taken away: another one takes its rank at the next step boundary, or the
    world shrinks there, or else the run stops there and saves."""
    leaver = state.workers[number]
    if leaver.is_fenced or leaver.leaves:
        return
    leaver.leaves = True
    mine = [worker for worker in state.workers.values() if worker.node == leaver.node]
    if all(worker.leaves for worker in mine) and state.setup.num_nodes > 1:
        state.leaving.add(leaver.node)
    if leaver.rank is None:
        _fence(state, leaver, turn)
        turn.send(leaver.node, say.KillWorker(worker=number))
    ranks = [
        rank
        for rank, slot in enumerate(state.slots)
        if slot.worker is not None and state.workers[slot.worker].leaves
    ]
    at_work = state.phase in ("joining", "training")
    if not ranks or not at_work or state.stop_by is not None:
        return
    layout, told = world.layout_of(state), f"rank {ranks[-1]} is about to be taken away: "
    if layout is not None and len(ranks) > world.num_spare(state):
        layout = world.smaller(state)
    if layout is None:
        _note(state, f"{told}nobody can take its rank", turn)
        _stop_wanted(state, f"SIGTERM to rank {ranks[-1]}", turn)
        return
    is_as_large = layout.num_ranks == len(state.slots)
    how = "its rank goes to another process" if is_as_large else "the others go on"
    _note(state, f"{told}{how} at the next step boundary", turn)
    _regroup(state, layout, turn, save=not world.is_kept_by_others(state))


def _note(state: State, text: str, turn: _Turn) -> None:
    turn.record(log.Noted(at=turn.clock.unix_s, generation=state.generation, text=text))


def _begin_regroup(state: State, layout: Layout, turn: _Turn) -> None:
    """The first rank has left as asked; the others do so at the same boundary."""
    state.generation += 1
    state.phase, state.symptom, state.regroup = "forming", None, None
    state.waiting_faults = []
    state.form_deadline_s = turn.clock.monotonic_s + state.setup.grace_s
    for slot in state.slots:
        if slot.worker is not None and state.workers[slot.worker].leaves:
            state.workers[slot.worker].rank = None
            slot.worker = None
    if layout.num_ranks != len(state.slots):
        reason = "processes for more ranks are ready"
        if layout.num_ranks < len(state.slots):
            reason = "a node is taken away and no spare is left"
        _resize(state, layout, reason, turn)


def _start(state: State, node: int, rank: int | None, turn: _Turn) -> int:
    number = state.num_started
    state.num_started += 1
    state.workers[number] = Worker(node=node, rank=rank)
    turn.send(node, say.StartWorker(worker=number, rank=rank))
    return number


def _join(state: State, turn: _Turn) -> None:
    """Every slot has a worker that waits: they are a generation now."""
    state.phase, state.symptom = "joining", None
    state.form_deadline_s = turn.clock.monotonic_s + state.setup.meet_timeout_s
    state.num_at_step, state.own_times = {}, {}
    state.inquiry = state.step_done_s = None
    if state.stragglers is not None:
        state.stragglers.forget()
    layout, state.regroup = world.layout_of(state), None
    members = [state.workers[slot.worker] for slot in state.slots if slot.worker is not None]
    store = members[0].store
    assert store is not None, "a worker that waits has said where its store is"
    taken = {(each.node, each.local_rank) for each in members if each.generation}
    for rank, (slot, worker) in enumerate(zip(state.slots, members, strict=True)):
        if not worker.generation:
            worker.local_rank = _free_place(state, worker.node, rank, taken)
            taken.add((worker.node, worker.local_rank))
        worker.generation, worker.waits = state.generation, False
        worker.part = part_of(layout, rank) if layout is not None else None
        slot.met = slot.restored = slot.completed = None
        slot.last_step = 0
        _tell(
            state,
            slot.worker,
            say.Join(
                generation=state.generation,
                rank=rank,
                local_rank=worker.local_rank,
                world_size=len(state.slots),
                host=store[0],
                port=store[1],
                faults=_due_now(state),
                layout=layout,
                skipped={step: list(ids) for step, ids in state.history.poison.items()},
            ),
            turn,
        )
    if state.failure is not None:
        state.failure.formed_at = turn.clock.monotonic_s
    for number, worker in state.workers.items():
        if worker.leaves and not worker.is_fenced:  # what it held, others have by now
            _fence(state, worker, turn)
            turn.send(worker.node, say.KillWorker(worker=number))


def _free_place(state: State, node: int, rank: int, taken: set[tuple[int, int]]) -> int:
    """The accelerator a worker takes on its node: that of the rank, if it is free."""
    per_node = state.setup.ranks_per_node
    usual = rank % per_node
    order = [usual, *(place for place in range(per_node) if place != usual)]
    return next((place for place in order if (node, place) not in taken), usual)


def _keep_spares(state: State, turn: _Turn) -> None:
    """As many spares as were asked for, on the nodes that have the fewest."""
    setup = state.setup
    spares = [worker.node for worker in state.workers.values() if worker.rank is None]
    free = world.free_nodes(state) if state.split is not None else []
    missing = min(len(free), setup.num_ranks - len(state.slots))
    wanted = missing or setup.num_spares
    limit = (wanted + state.num_resizes) * _SPARE_ATTEMPTS + state.restarts
    while len(spares) < wanted and state.num_spares_started < limit and state.agents:
        aside = state.history.set_aside
        node = min(
            sorted(state.agents),
            key=lambda node: (
                node in state.leaving,
                node not in free,
                node in aside,
                spares.count(node),
            ),
        )
        _start(state, node, None, turn)
        state.num_spares_started += 1
        spares.append(node)


# What workers say.


def _said(state: State, event: say.Said, turn: _Turn) -> None:
    number, message = event.worker, event.message
    worker = state.workers[number]
    match message:
        case say.Ready(host=host, port=port):
            if worker.store is None and not worker.is_fenced:
                worker.store, worker.waits = (host, port), True
                _go_on(state, turn)
                _fault_of_spare(state, worker, turn)
        case say.Parked():
            if event.generation == worker.generation:
                _parked(state, number, message, turn)
        case say.Crashed():
            if event.generation == worker.generation:
                _crashed(state, number, message, turn)
        case say.LeaveWanted():
            _leave_wanted(state, number, turn)
        case _:
            rank, is_at_work = worker.rank, state.phase in ("joining", "training")
            if rank is not None and is_at_work and event.generation == state.generation:
                _news(state, rank, message, turn)


def _news(state: State, rank: int, message: say.FromWorker, turn: _Turn) -> None:
    """From a rank of the generation at work."""
    at, generation, slot = turn.clock.unix_s, state.generation, state.slots[rank]
    match message:
        case say.Met(world_size=world_size):
            slot.met = message
            if world_size != len(state.slots):
                how = f"met a world of {world_size} ranks, asked for {len(state.slots)}"
                _give_up(state, "failed", f"rank {rank}: {how}", turn)
            elif all(each.met for each in state.slots):
                state.form_deadline_s = None
                if state.failure is not None:
                    state.failure.met_at = turn.clock.monotonic_s
        case say.Restored():
            _restored(state, rank, message, turn)
        case say.StepDone(step=step, own_s=own_s):
            _step_done(state, slot, step, turn)
            _note_speed(state, rank, step, own_s, turn)
        case say.EvaluationDone(step=step, loss=loss, seconds=seconds):
            turn.record(
                log.Evaluated(at=at, generation=generation, step=step, loss=loss, seconds=seconds)
            )
        case say.BaselineDone(name=name, loss=loss):
            turn.record(log.BaselineEvaluated(at=at, generation=generation, name=name, loss=loss))
        case say.NoteMade(text=text):
            turn.record(log.Noted(at=at, generation=generation, text=text))
        case say.SaveDone():
            turn.record(
                log.CheckpointSaved(
                    at=at,
                    generation=generation,
                    step=message.step,
                    checkpoint=message.checkpoint,
                    num_bytes=message.num_bytes,
                    stall_s=message.stall_s,
                    write_s=message.write_s,
                )
            )
        case say.SaveError(step=step, reason=reason):
            turn.record(
                log.CheckpointFailed(at=at, generation=generation, step=step, reason=reason)
            )
        case say.CopyDone():
            turn.record(
                log.CheckpointCopied(
                    at=at,
                    generation=generation,
                    step=message.step,
                    url=message.url,
                    num_bytes=message.num_bytes,
                    stored_bytes=message.stored_bytes,
                    seconds=message.seconds,
                    checked=message.checked,
                    note=message.note,
                )
            )
        case say.CopyError(step=step, reason=reason):
            turn.record(
                log.CheckpointCopyFailed(at=at, generation=generation, step=step, reason=reason)
            )
        case say.StepVotedDown(step=step, reason=reason):
            turn.record(log.StepRefused(at=at, generation=generation, step=step, reason=reason))
        case say.CorruptionSeen():
            turn.record(
                log.CorruptionFound(
                    at=at,
                    generation=generation,
                    step=message.step,
                    ranks=message.ranks,
                    suspects=message.suspects,
                    tensors=message.tensors,
                    verdict=message.verdict,
                    healed=message.healed,
                    goes_on_after=message.goes_on_after,
                )
            )
        case say.FaultDue(fault=fault):
            _fault_due(state, rank, fault, turn)
        case say.Completed():
            slot.completed = message
            if all(each.completed for each in state.slots):
                _complete(state, turn)
        case say.Ready() | say.Parked() | say.Crashed() | say.LeaveWanted():
            pass  # not about a generation: `_said` has them
        case _:
            assert_never(message)


def _fault_due(state: State, rank: int, text: str, turn: _Turn) -> None:
    """A rank stands at the place of a drill's fault, and waits: let it happen to whom it should."""
    if text not in state.faults:
        return
    fault = parse_fault(text)
    if "spare" in (fault.when, fault.kind) and not _spares_ready(state):
        _keep_spares(state, turn)
        if any(worker.rank is None for worker in state.workers.values()):
            state.waiting_faults.append((rank, text))
            return
    if fault.sample is None:
        at = state.faults.index(text)
        state.faults = state.faults[:at] + state.faults[at + 1 :]
    trigger = state.slots[rank].worker
    victims: list[int | None] = [state.slots[each].worker for each in fault.victims(rank)]
    if fault.kind == "spare":
        victims = [None, *_spares_ready(state)][1:2]
    if fault.row.is_whole_node and fault.for_s and trigger is not None:
        node = state.workers[trigger].node
        state.away_until_s[node] = turn.clock.monotonic_s + fault.for_s
    for victim in victims:
        if victim is not None:
            turn.send(state.workers[victim].node, say.InjectFault(worker=victim, fault=text))
    dies = trigger in victims and fault.kind in ("kill", "store")
    if fault.row.maker == "agent" and not dies:
        _tell(state, trigger, say.Fire(fault=text), turn)


def _fault_of_spare(state: State, worker: Worker, turn: _Turn) -> None:
    """A worker is ready: what waited for a spare need not wait any more, if it is one."""
    if worker.rank is None and worker.waits:
        waiting, state.waiting_faults = state.waiting_faults, []
        for rank, text in waiting:
            _fault_due(state, rank, text, turn)


def _spares_ready(state: State) -> list[int]:
    """Warm spares that wait for a rank."""
    return [
        number
        for number, worker in state.workers.items()
        if worker.rank is None and worker.waits and not worker.is_fenced
    ]


def _due_now(state: State) -> list[str]:
    """Faults that workers of the next generation may come to: those of a recovery only in one, and
    from their step on."""
    return [
        text
        for text in state.faults
        for fault in [parse_fault(text)]
        if not fault.in_recovery
        or (state.failure is not None and state.furthest_step + 1 >= fault.step)
    ]


def _fault_while_parked(state: State, rank: int, turn: _Turn) -> None:
    for text in state.faults:
        fault = parse_fault(text)
        if fault.phase == "parked" and fault.ranks[0] == rank and text in _due_now(state):
            _fault_due(state, rank, text, turn)
            return


def _restored(state: State, rank: int, message: say.Restored, turn: _Turn) -> None:
    at, generation = turn.clock.unix_s, state.generation
    if state.slots[rank].restored is not None:
        return
    state.slots[rank].restored = message
    if rank == 0:
        for checkpoint, reason in message.refused:
            turn.record(
                log.CheckpointRefused(
                    at=at, generation=generation, checkpoint=checkpoint, reason=reason
                )
            )
    if not all(each.restored for each in state.slots):
        return
    met = state.slots[0].met
    turn.record(
        log.TrainingStarted(
            at=at,
            generation=generation,
            first_step=message.first_step,
            checkpoint=message.checkpoint,
            pids=[
                state.workers[each.worker].pid or 0
                for each in state.slots
                if each.worker in state.workers
            ],
            backend=met.backend if met is not None else "unknown",
            world_size=len(state.slots),
        )
    )
    state.furthest_step = max(state.furthest_step, message.first_step - 1)
    if state.failure is not None:
        state.failure.restored_at = turn.clock.monotonic_s
    if state.stop_by is not None:
        _tell_all(state, say.StopAtBoundary(), turn)


def _step_done(state: State, slot: Slot, step: int, turn: _Turn) -> None:
    """Every rank's news of a step passes here; what counts is when the last one is through."""
    if step <= slot.last_step:
        return
    slot.last_step = step
    state.num_at_step[step] = state.num_at_step.get(step, 0) + 1
    if state.num_at_step[step] < len(state.slots):
        return
    state.num_at_step = {other: n for other, n in state.num_at_step.items() if other > step}
    state.furthest_step = max(state.furthest_step, step)
    before, state.step_done_s = state.step_done_s, turn.clock.monotonic_s
    state.step_s = state.step_done_s - before if before is not None else None
    if state.phase == "joining":
        state.phase = "training"
        if state.failure is not None:
            turn.record(_recovered(state, state.failure, turn.clock))
            state.failure = None
        _keep_spares(state, turn)


_WORST_LAST: tuple[say.Source, ...] = (
    "own",
    "replica",
    "shadow",
    "memory",
    "checkpoint",
    "initial",
)


def _recovered(state: State, failure: Failure, clock: Clock) -> log.Recovered:
    restored = [slot.restored for slot in state.slots if slot.restored is not None]
    resumed_from = restored[0].first_step - 1 if restored else 0
    sources = [each.source for each in restored]
    formed = failure.formed_at or failure.known_at
    met = failure.met_at or formed
    back = failure.restored_at or met
    began = failure.happened_at if failure.happened_at is not None else failure.known_at
    return log.Recovered(
        at=clock.unix_s,
        generation=state.generation,
        lost_rank=failure.rank,
        failed_after_step=failure.after_step,
        resumed_from_step=resumed_from,
        steps_lost=max(0, failure.after_step - resumed_from),
        source=max(sources, key=_WORST_LAST.index, default="initial"),
        in_place="own" in sources,
        detect_s=None if failure.happened_at is None else failure.known_at - failure.happened_at,
        fence_s=formed - failure.known_at,
        start_s=met - formed,
        restore_s=back - met,
        first_step_s=clock.monotonic_s - back,
        downtime_s=clock.monotonic_s - began,
    )


# Ranks that stand still, or are slow.


def _stuck(state: State, event: say.Stuck, turn: _Turn) -> None:
    """A worker is late. Among ranks at work it may only be waiting for another one."""
    number, worker = event.worker, state.workers[event.worker]
    if worker.is_fenced or event.generation != worker.generation:
        return
    if worker.rank is None:
        worker.is_fenced = True
        turn.send(worker.node, say.KillWorker(worker=number))
    elif state.phase in ("joining", "training") and worker.generation == state.generation:
        if suspicion.wants_a_look(state, event, turn.clock):
            turn.send_all(state.agents, say.Look())
    elif state.phase == "forming" and not worker.generation:
        _lose(state, [number], suspicion.how_stuck(event), turn, cause="hang")


def _seen(state: State, event: say.Seen, turn: _Turn) -> None:
    worker = state.workers[event.worker]
    if state.inquiry is not None and worker.rank is not None and not worker.is_fenced:
        if worker.generation == state.generation:
            if event.generation < worker.generation:
                # It was told to join and has not, while others have stood still waiting for it.
                event = msgspec.structs.replace(event, is_late=True)
            state.inquiry.seen[worker.rank] = event
        _judge_when_answered(state, turn)


def _judge_when_answered(state: State, turn: _Turn) -> None:
    if state.phase not in ("joining", "training"):
        state.inquiry = None
    if not suspicion.is_answered(state, turn.clock):
        return
    verdict = suspicion.judge(state, turn.clock)
    if verdict is None:
        return
    for event in verdict.events:
        turn.record(event)
    numbers = [state.slots[rank].worker for rank in verdict.ranks or range(len(state.slots))]
    lost = [number for number in numbers if number is not None]
    if verdict.ranks:
        _lose(state, lost, verdict.how, turn, cause="hang")
    elif lost:  # nobody is to blame: all leave, and meet again
        _tell(state, lost[0], say.Interrupt(generation=state.generation), turn)
        _lose(state, lost[:1], verdict.how, turn, cause="network", ends=False)


def _note_speed(state: State, rank: int, step: int, own_s: float | None, turn: _Turn) -> None:
    if state.phase != "training":
        return
    for one in suspicion.note_own_time(state, rank, step, own_s):
        number = state.slots[one.rank].worker
        if number is None:
            continue
        evicts = suspicion.is_worth_evicting(state, one, step, state.step_s)
        turn.record(
            log.StragglerNamed(
                at=turn.clock.unix_s,
                generation=state.generation,
                rank=one.rank,
                node=state.workers[number].node,
                factor=one.factor,
                step=step,
                num_steps=one.num_steps,
                evicted=evicts,
            )
        )
        if evicts:
            how = f"{one.factor:.2f} times as slow as its peers"
            _lose(state, [number], how, turn, cause="slow")
            return


# Losing workers.


def _parked(state: State, number: int, message: say.Parked, turn: _Turn) -> None:
    worker = state.workers[number]
    if worker.is_fenced:
        return
    worker.waits = True
    at_work = state.phase in ("joining", "training")
    if message.planned and at_work and state.regroup is not None and worker.rank is not None:
        _begin_regroup(state, state.regroup, turn)
    if worker.rank is not None and state.phase in ("joining", "training"):
        # It left by itself: somebody it talked to is gone, and the cause is still to be told.
        if state.symptom is None:
            reason = message.reason or "left its generation"
            state.symptom = Symptom(worker.rank, reason, turn.clock.monotonic_s)
        return
    if worker.rank is not None:
        _fault_while_parked(state, worker.rank, turn)
    _go_on(state, turn)


def _crashed(state: State, number: int, crash: say.Crashed, turn: _Turn) -> None:
    """A worker's own exception. A sound process tries again; a second time it is replaced."""
    worker = state.workers[number]
    if worker.rank is None or worker.is_fenced:
        return  # a spare: its exit follows
    if state.phase in ("joining", "training", "forming"):
        how = f"{crash.kind}: {crash.message}"
        if say.names_want_of_memory(how):
            how = f"out of memory: {how}"
        _lose(state, [number], how, turn, crash=crash, ends=not crash.parks)


def _gone(state: State, number: int, end: say.Exited, turn: _Turn) -> None:
    """A process has ended."""
    worker = state.workers[number]
    holds = worker.rank is not None and state.slots[worker.rank].worker == number
    if holds and not worker.is_fenced and state.phase != "clearing":
        cause: Cause = "out of memory" if end.out_of_memory else "process"
        worker.is_fenced = True
        _lose(state, [number], _how(end), turn, cause=cause)
    if state.phase != "over":
        _forget(state, number)
        _go_on(state, turn)


def _forget(state: State, number: int) -> None:
    worker = state.workers.pop(number, None)
    if worker is not None and worker.rank is not None:
        slot = state.slots[worker.rank]
        if slot.worker == number:
            slot.worker = None


def _agent_lost(state: State, event: AgentLost, turn: _Turn) -> None:
    """Workers die with their agent. One that cannot be reached ends them when its lease is over;
    until then their ranks are nobody's."""
    node = event.node
    state.agents.discard(node)
    turn.actions.append(KillAgent(node))  # only the connection may be gone
    mine = [number for number, worker in state.workers.items() if worker.node == node]
    ranked = [number for number in mine if state.workers[number].rank is not None]
    for number in mine:
        if number not in ranked:
            _forget(state, number)
    for number in ranked:
        worker = state.workers[number]
        worker.is_fenced = True
        if event.in_doubt_s and worker.generation and worker.rank is not None:
            state.in_doubt_s[worker.rank] = turn.clock.monotonic_s + event.in_doubt_s
    if ranked and state.phase != "clearing":
        _lose(state, ranked, f"node {node} is lost", turn, cause="node")
    if state.phase == "over":
        return
    for number in ranked:
        _forget(state, number)
    if node not in state.away_until_s:
        _start_agent(state, node, turn)
    _go_on(state, turn)


def _lose(
    state: State,
    lost: list[int],
    how: str,
    turn: _Turn,
    *,
    cause: Cause = "process",
    crash: say.Crashed | None = None,
    detail: str | None = None,
    ends: bool = True,
) -> None:
    """Workers with a rank are lost: note it, and bring the others to the next generation.

    Args:
        lost: Which ones; the first is told of.
        cause: As far as this alone tells; that of a crash follows from it.
        ends: Whether their processes end; otherwise they try again.
    """
    loss = _loss(state, lost[0], how, cause, crash)
    at_work = state.phase in ("joining", "training")
    never_worked = crash is not None and state.restarts == 0 and state.furthest_step == 0
    # A new process that cannot even get ready is an attempt that failed; others that are lost
    # meanwhile belong to the failure that is being recovered from.
    never_ready = any(not state.workers[number].waits for number in lost) and not any(
        state.workers[number].generation for number in lost
    )
    needs_a_person = crash is not None and not crash.retry
    if at_work or never_ready or never_worked or needs_a_person:
        verdict = _judge(state, loss, turn)
    else:
        verdict = Verdict(cause=note(state.history, loss), rung="replace process")
    _note_loss(state, loss, verdict.cause, crash.where if crash is not None else detail, turn)
    if state.failure is None:
        state.failure = _failure(state, loss, turn)
    state.fault_at = None
    state.failure.exit_code = verdict.exit_code
    if verdict.rung == "stop":
        _give_up(state, "failed", verdict.reason, turn)
        return
    _note_measures(state, loss, verdict, turn)
    if at_work:
        state.restarts += 1
        old, state.generation = state.generation, state.generation + 1
        state.waiting_faults = []
        state.phase, state.symptom, state.regroup = "forming", None, None
        state.form_deadline_s = turn.clock.monotonic_s + state.setup.park_timeout_s
        for slot in state.slots:
            if slot.worker is not None and slot.worker not in lost:
                _tell(state, slot.worker, say.Interrupt(generation=old), turn)
    is_sound = crash is None or (crash.parks and verdict.rung in ("retry", "skip"))
    for number in lost:
        _vacate(state, number, turn, ends=ends or (at_work and not is_sound))
    if verdict.rung == "clear":
        _clear(state, turn)
    _go_on(state, turn)


def _fence(state: State, worker: Worker, turn: _Turn) -> None:
    worker.is_fenced, worker.waits = True, False
    worker.fence_by_s = turn.clock.monotonic_s + state.setup.fence_timeout_s


def _vacate(state: State, number: int, turn: _Turn, *, ends: bool) -> None:
    """Take the slot from a worker that ends; one that does not keeps it."""
    worker = state.workers[number]
    if ends and not worker.is_fenced:
        _fence(state, worker, turn)
        turn.send(worker.node, say.KillWorker(worker=number))
    if ends and worker.rank is not None:
        state.slots[worker.rank].worker = None
        worker.rank = None


def _loss(
    state: State, number: int, how: str, cause: Cause, crash: say.Crashed | None
) -> policy.Loss:
    worker = state.workers[number]
    assert worker.rank is not None
    told = None
    if crash is not None:
        cause = policy.cause_of(how)
        told = policy.Crash(
            kind=crash.kind,
            message=crash.message,
            step=crash.step,
            samples=tuple(crash.samples),
            may_retry=crash.retry,
            is_sound=crash.parks,
            exit_code=crash.exit_code,
        )
    return policy.Loss(
        slot=worker.rank, node=worker.node, worker=number, how=how, cause=cause, crash=told
    )


def _judge(state: State, loss: policy.Loss, turn: _Turn) -> Verdict:
    # A step that one rank is through was taken by all, even if not all have said so yet.
    reached = max([state.furthest_step, *(slot.step for slot in state.slots)])
    now_s = turn.clock.monotonic_s
    return policy.judge(state.history, loss, state.setup.rules, reached=reached, now_s=now_s)


def _note_measures(state: State, loss: policy.Loss, verdict: Verdict, turn: _Turn) -> None:
    """What is decided for longer than this generation."""
    at, generation = turn.clock.unix_s, state.generation
    if verdict.strikes:
        turn.record(
            log.NodeSetAside(
                at=at,
                generation=generation,
                node=loss.node,
                strikes=verdict.strikes,
                window_s=state.setup.strike_window_s,
            )
        )
    if verdict.rung == "skip":
        step, samples = list(state.history.poison.items())[-1]
        turn.record(
            log.BatchSkipped(at=at, generation=generation, step=step, samples=list(samples))
        )


def _failure(state: State, loss: policy.Loss, turn: _Turn) -> Failure:
    happened_at, state.fault_at = state.fault_at, None
    return Failure(
        rank=loss.slot,
        how=loss.how,
        happened_at=happened_at,
        known_at=turn.clock.monotonic_s,
        after_step=max(state.step, state.furthest_step),
    )


def _note_loss(
    state: State, loss: policy.Loss, cause: Cause, detail: str | None, turn: _Turn
) -> None:
    turn.record(
        log.WorkerLost(
            at=turn.clock.unix_s,
            generation=state.generation,
            rank=loss.slot,
            node=loss.node,
            pid=state.workers[loss.worker].pid,
            how=loss.how,
            detail=detail,
            last_step=state.slots[loss.slot].step,
            cause=cause,
        )
    )


def _clear(state: State, turn: _Turn) -> None:
    """The last resort: every process anew, from a checkpoint."""
    state.phase = "clearing"
    turn.send_all(state.agents, say.KillWorkers())
    for worker in state.workers.values():
        worker.rank = None
        if not worker.is_fenced:
            _fence(state, worker, turn)
    state.slots = []
    state.form_deadline_s = None


def _how(end: say.Exited) -> str:
    if end.returncode >= 0:
        return f"exited with {end.returncode} without a completion record"
    why = "out of memory: " if end.out_of_memory else ""
    try:
        return f"{why}killed by {signal.Signals(-end.returncode).name}"
    except ValueError:
        return f"{why}killed by signal {-end.returncode}"


# Ending.


def _complete(state: State, turn: _Turn) -> None:
    """Every rank has a completion record: do they agree, and on what was asked for?"""
    records = [slot.completed for slot in state.slots if slot.completed is not None]
    worlds = sorted({record.world_size for record in records})
    if worlds != [len(state.slots)]:
        reason = f"asked for {len(state.slots)} ranks, the workers saw {worlds}"
        _give_up(state, "failed", reason, turn)
    elif len({record.state_digest for record in records}) > 1:
        _give_up(state, "failed", "the ranks ended with different parameters", turn)
    elif len({(record.outcome, record.step) for record in records}) > 1:
        _give_up(state, "failed", "the ranks ended at different steps", turn)
    else:
        if state.failure is not None:  # it came after the last step, so no step ended the recovery
            turn.record(_recovered(state, state.failure, turn.clock))
            state.failure = None
        if records[0].outcome == "finished":
            _give_up(state, "finished", None, turn)
        else:
            by = state.stop_by or "a signal to a worker"
            _give_up(state, "interrupted", f"stopped by {by}", turn)


def _give_up(state: State, outcome: Outcome, reason: str | None, turn: _Turn) -> None:
    """The run is over, well or not."""
    known = [slot.completed for slot in state.slots if slot.completed is not None]
    first = known[0] if known else None
    everyone = known if len(known) == len(state.slots) else []
    turn.record(
        log.RunFinished(
            at=turn.clock.unix_s,
            generation=state.generation,
            outcome=outcome,
            step=first.step if first is not None else state.furthest_step,
            saved_step=first.saved_step if first is not None else None,
            state_digest=first.state_digest if first is not None else None,
            held_out_loss=first.held_out_loss if first is not None else None,
            restarts=state.restarts,
            reason=reason,
            exactness=state.exactness,
            baseline_bytes=[record.baseline_bytes for record in everyone],
            peak_bytes=[record.peak_bytes for record in everyone],
        )
    )
    if not everyone:
        turn.send_all(state.agents, say.KillWorkers())
    turn.send_all(state.agents, say.Leave())
    state.phase, state.outcome, state.reason = "over", outcome, reason


def _stop_wanted(state: State, by: str, turn: _Turn) -> None:
    turn.record(log.StopAsked(at=turn.clock.unix_s, generation=state.generation, by=by))
    state.stop_by = by
    state.stops += 1
    first = state.generation == state.setup.first_generation
    if state.phase == "gathering" or (first and state.phase == "forming"):
        _give_up(state, "interrupted", f"stopped by {by} before training", turn)
    elif state.stops > 1:
        _force(state, turn)
        _give_up(state, "interrupted", f"asked to stop at once by {by}", turn)
    else:
        _tell_all(state, say.StopAtBoundary(), turn)
        state.stop_deadline_s = turn.clock.monotonic_s + state.setup.grace_s


def _tick(state: State, turn: _Turn) -> None:
    now = turn.clock.monotonic_s
    _judge_when_answered(state, turn)
    symptom = state.symptom
    if symptom is not None and now - symptom.since_s > state.setup.cause_timeout_s:
        _regroup_of_symptom(state, symptom, turn)
    if state.stop_deadline_s is not None and now >= state.stop_deadline_s:
        _force(state, turn)
        grace = f"{state.setup.grace_s:.0f} s"
        reason = f"stopped by {state.stop_by}: no step boundary within the grace of {grace}"
        _give_up(state, "interrupted", reason, turn)
        return
    _end_agents_that_do_not_obey(state, turn)
    certain = [rank for rank, until_s in state.in_doubt_s.items() if now >= until_s]
    for rank in certain:
        del state.in_doubt_s[rank]
    if certain:
        _go_on(state, turn)
    overdue = sorted(node for node, due_s in state.agents_due_s.items() if now >= due_s)
    if state.phase == "forming":
        _go_on(state, turn)
    if overdue and _is_needed(state, overdue) and world.smaller(state) is None:
        waited = f"{state.setup.agent_timeout_s:.0f} s"
        _give_up(state, "failed", f"no agent on node(s) {overdue} within {waited}", turn)
        return
    for node in [node for node, until in state.away_until_s.items() if now >= until]:
        del state.away_until_s[node]
        _start_agent(state, node, turn)
    for node in overdue:
        turn.actions.append(KillAgent(node))
        _start_agent(state, node, turn)
    if state.form_deadline_s is not None and now >= state.form_deadline_s:
        state.form_deadline_s = None
        _fence_the_late(state, turn)


def _is_needed(state: State, nodes: list[int]) -> bool:
    """Whether the run cannot go on without one of these nodes."""
    if state.phase in ("gathering", "clearing"):
        return True
    empty = [rank for rank, slot in enumerate(state.slots) if slot.worker is None]
    return any(state.setup.node_of(rank) in nodes for rank in empty)


def _end_agents_that_do_not_obey(state: State, turn: _Turn) -> None:
    """The kernel then ends their workers."""
    now = turn.clock.monotonic_s
    nodes = set()
    for worker in state.workers.values():
        if worker.fence_by_s is not None and now >= worker.fence_by_s:
            worker.fence_by_s = now + state.setup.fence_timeout_s
            nodes.add(worker.node)
    turn.actions.extend(KillAgent(node) for node in sorted(nodes))


def _regroup_of_symptom(state: State, symptom: Symptom, turn: _Turn) -> None:
    """Nobody's own end explains the lost connection: all that is known is who lost it."""
    number = state.slots[symptom.rank].worker
    state.symptom = None
    if number is not None and state.phase in ("joining", "training"):
        how = "lost the connection to another rank"
        _lose(state, [number], how, turn, cause="network", detail=symptom.reason, ends=False)


def _fence_the_late(state: State, turn: _Turn) -> None:
    """Workers that should have parked by now are killed; of those that do not meet, one is."""
    late = [
        number
        for number, worker in state.workers.items()
        if worker.generation and not worker.waits and worker.rank is not None
    ]
    if late and state.phase == "forming":
        how = f"did not leave its generation within {state.setup.park_timeout_s:.0f} s"
        _lose(state, late, how, turn, cause="hang")
    alone = [slot.worker for slot in state.slots if slot.met is None and slot.worker is not None]
    if alone and state.phase == "joining":
        how = f"did not meet the others within {state.setup.meet_timeout_s:.0f} s"
        _lose(state, [max(alone)], how, turn, cause="hang")  # the newest holds the least


def _force(state: State, turn: _Turn) -> None:
    """Ask nobody any more: end the agents, and the kernel ends their workers."""
    nodes = {worker.node for worker in state.workers.values()}
    turn.actions.extend(KillAgent(node) for node in sorted(nodes))


def _tell(state: State, number: int | None, message: say.ToWorker, turn: _Turn) -> None:
    if number is not None:
        turn.send(state.workers[number].node, say.Tell(worker=number, message=message))


def _tell_all(state: State, message: say.ToWorker, turn: _Turn) -> None:
    for slot in state.slots:
        _tell(state, slot.worker, message, turn)
