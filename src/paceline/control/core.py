"""The controller's mind: `decide(state, event, clock) -> (state, actions)`, and nothing else.

Pure: no clock, no socket, no file. The shell in `controller.py` feeds it what happened and
carries out what it answers, so tests and simulations run this very code.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from paceline.control import messages as say
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
    Rank,
    Record,
    Send,
    StartAgent,
    State,
    StopWanted,
    Symptom,
    Tick,
)
from paceline.record import events as log


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


def decide(state: State, event: Happening, clock: Clock) -> tuple[State, list[Action]]:
    """The next state, and what to do now.

    Never raises for anything an agent can send: what does not fit the state, or belongs to an
    older generation, changes nothing.
    """
    turn = _Turn(clock)
    if state.phase == "over":
        return state, []
    match event:
        case Begin():
            state = _begin(state, turn)
        case AgentJoined(node):
            state = _agent_joined(state, node, turn)
        case AgentLost(node):
            state = _agent_lost(state, node, turn)
        case StopWanted(by):
            state = _stop_wanted(state, by, turn)
        case Tick():
            state = _tick(state, turn)
        case say.Started() | say.Exited() | say.Said() | say.FaultDone():
            if event.generation == state.generation and event.rank < len(state.ranks):
                state = _from_agent(state, event, turn)
        case _:
            assert_never(event)
    return state, turn.actions


def _from_agent(
    state: State, event: say.Started | say.Exited | say.Said | say.FaultDone, turn: _Turn
) -> State:
    match event:
        case say.Started():
            turn.record(
                log.WorkerStarted(
                    at=turn.clock.unix_s,
                    generation=state.generation,
                    rank=event.rank,
                    node=state.setup.node_of(event.rank),
                    pid=event.pid,
                )
            )
            return _with_rank(state, event.rank, alive=True, pid=event.pid)
        case say.Exited():
            return _exited(state, event, turn)
        case say.FaultDone():
            turn.record(
                log.FaultInjected(
                    at=turn.clock.unix_s,
                    generation=state.generation,
                    fault=event.fault,
                    rank=event.rank,
                    pid=event.pid,
                )
            )
            return replace(state, fault_at=event.monotonic_s)
        case say.Said():
            return _said(state, event.rank, event.message, turn)


# Beginning.


def _begin(state: State, turn: _Turn) -> State:
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
    return _gather(replace(state, generation=setup.first_generation - 1), turn)


def _gather(state: State, turn: _Turn) -> State:
    """A new generation: wait for every agent, starting those that are missing."""
    state = replace(
        state,
        phase="gathering",
        generation=state.generation + 1,
        ranks=(),
        fault_at=None,
        symptom=None,
        deadline_s=turn.clock.monotonic_s + state.setup.agent_timeout_s,
    )
    for node in range(state.setup.num_nodes):
        if node not in state.agents:
            turn.actions.append(StartAgent(node))
    return _start_when_gathered(state, turn)


def _agent_joined(state: State, node: int, turn: _Turn) -> State:
    state = replace(state, agents=state.agents | {node})
    return _start_when_gathered(state, turn)


def _start_when_gathered(state: State, turn: _Turn) -> State:
    setup = state.setup
    if state.phase != "gathering" or len(state.agents) < setup.num_nodes:
        return state
    for rank in range(setup.num_ranks):
        start = say.StartWorker(generation=state.generation, rank=rank, faults=list(state.faults))
        turn.send(setup.node_of(rank), start)
    # A rank counts as alive from the order to start it: its exit is what ends it.
    ranks = tuple(Rank(alive=True) for _ in range(setup.num_ranks))
    return replace(state, phase="starting", ranks=ranks, deadline_s=None)


# What workers say.


def _said(state: State, rank: int, message: say.FromWorker, turn: _Turn) -> State:
    now = turn.clock
    at, generation = now.unix_s, state.generation
    match message:
        case say.StoreListening(host=host, port=port):
            for other in range(len(state.ranks)):
                rendezvous = say.Rendezvous(host=host, port=port)
                _tell(state, other, rendezvous, turn)
        case say.Met(world_size=world_size):
            state = _with_rank(state, rank, met=message)
            if world_size != state.setup.num_ranks:
                how = f"met a world of {world_size} ranks, asked for {state.setup.num_ranks}"
                return _fail(state, rank, how, detail=None, retry=False, turn=turn)
            if all(r.met for r in state.ranks) and state.failure is not None:
                state = replace(state, failure=replace(state.failure, met_at=now.monotonic_s))
        case say.Restored():
            state = _restored(state, rank, message, turn)
        case say.StepDone(step=step):
            state = _with_rank(state, rank, last_step=step)
            state = _after_step(state, turn)
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
        case say.StepVotedDown(step=step, reason=reason):
            turn.record(log.StepRefused(at=at, generation=generation, step=step, reason=reason))
        case say.FaultDue(fault=fault):
            if fault in state.faults:
                state = replace(
                    state, faults=tuple(other for other in state.faults if other != fault)
                )
                order = say.InjectFault(generation=generation, rank=rank, fault=fault)
                turn.send(state.setup.node_of(rank), order)
        case say.Completed():
            state = _with_rank(state, rank, completed=message)
        case say.Crashed():
            state = _with_rank(state, rank, crashed=message)
            if state.phase == "fencing":
                return state  # whatever it says now, the cause is known
            if message.peer_lost:
                state = replace(state, symptom=state.symptom or Symptom(rank, now.monotonic_s))
            else:
                state = _crashed(state, rank, message, turn)
        case _:
            assert_never(message)
    return state


def _restored(state: State, rank: int, message: say.Restored, turn: _Turn) -> State:
    at, generation = turn.clock.unix_s, state.generation
    state = _with_rank(state, rank, restored=message)
    if rank == 0:
        for checkpoint, reason in message.refused:
            turn.record(
                log.CheckpointRefused(
                    at=at, generation=generation, checkpoint=checkpoint, reason=reason
                )
            )
    if not all(r.restored for r in state.ranks):
        return state
    met = state.ranks[0].met
    turn.record(
        log.TrainingStarted(
            at=at,
            generation=generation,
            first_step=message.first_step,
            checkpoint=message.checkpoint,
            backend=met.backend if met is not None else "unknown",
            world_size=len(state.ranks),
        )
    )
    state = replace(state, furthest_step=max(state.furthest_step, message.first_step - 1))
    if state.failure is not None:
        state = replace(state, failure=replace(state.failure, restored_at=turn.clock.monotonic_s))
    if state.stop_by is not None:
        for other in range(len(state.ranks)):
            _tell(state, other, say.StopAtBoundary(), turn)
    return state


def _after_step(state: State, turn: _Turn) -> State:
    """Every rank's news of a step passes here; what counts is when the last one is through."""
    if state.phase not in ("starting", "training") or not all(r.last_step for r in state.ranks):
        return state
    if state.phase == "starting":
        state = replace(state, phase="training")
        if state.failure is not None:
            turn.record(_recovered(state, state.failure, turn.clock))
            state = replace(state, failure=None)
    return replace(state, furthest_step=max(state.furthest_step, state.step))


def _recovered(state: State, failure: Failure, clock: Clock) -> log.Recovered:
    restored = state.ranks[0].restored
    resumed_from = restored.first_step - 1 if restored is not None else 0
    fenced = failure.fenced_at or failure.known_at
    met = failure.met_at or fenced
    back = failure.restored_at or met
    began = failure.happened_at if failure.happened_at is not None else failure.known_at
    return log.Recovered(
        at=clock.unix_s,
        generation=state.generation,
        lost_rank=failure.rank,
        failed_after_step=failure.after_step,
        resumed_from_step=resumed_from,
        steps_lost=max(0, failure.after_step - resumed_from),
        detect_s=None if failure.happened_at is None else failure.known_at - failure.happened_at,
        fence_s=fenced - failure.known_at,
        start_s=met - fenced,
        restore_s=back - met,
        first_step_s=clock.monotonic_s - back,
        downtime_s=clock.monotonic_s - began,
    )


# Losing workers.


def _exited(state: State, event: say.Exited, turn: _Turn) -> State:
    rank = state.ranks[event.rank]
    state = _with_rank(state, event.rank, alive=False)
    # An abort at interpreter exit after the completion record does no harm (torch 2.13 over gloo).
    lost = rank.completed is None and not event.fenced
    follows = rank.crashed is not None and rank.crashed.peer_lost  # the cause is elsewhere
    if lost and not follows and state.phase != "fencing":
        state = _fail(state, event.rank, _how(event.returncode), detail=None, retry=True, turn=turn)
    elif state.symptom is not None and not any(other.alive for other in state.ranks):
        state = _fail_of_symptom(state, turn)
    return _when_all_gone(state, turn)


def _crashed(state: State, rank: int, crash: say.Crashed, turn: _Turn) -> State:
    how = f"{crash.kind}: {crash.message}"
    return _fail(state, rank, how, detail=crash.where, retry=crash.retry, turn=turn)


def _fail_of_symptom(state: State, turn: _Turn) -> State:
    """Nobody's own end explains the lost connection: all that is known is who lost it."""
    if state.symptom is None or state.phase in ("fencing", "gathering"):
        return state
    how = "lost the connection to another rank"
    crash = state.ranks[state.symptom.rank].crashed
    detail = crash.message if crash is not None else None
    return _fail(state, state.symptom.rank, how, detail=detail, retry=True, turn=turn)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with {returncode} without a completion record"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _agent_lost(state: State, node: int, turn: _Turn) -> State:
    state = replace(state, agents=state.agents - {node})
    turn.actions.append(KillAgent(node))  # only the connection may be gone
    mine = [rank for rank in range(len(state.ranks)) if state.setup.node_of(rank) == node]
    lost = [rank for rank in mine if state.ranks[rank].completed is None]
    # Workers die with their agent, so none of this node's is alive now.
    for rank in mine:
        state = _with_rank(state, rank, alive=False)
    if lost and state.phase not in ("fencing", "gathering"):
        state = _fail(state, lost[0], f"node {node} is lost", detail=None, retry=True, turn=turn)
    elif state.phase == "gathering":
        turn.actions.append(StartAgent(node))  # again; the deadline of gathering bounds it
    return _when_all_gone(state, turn)


def _fail(
    state: State, rank: int, how: str, *, detail: str | None, retry: bool, turn: _Turn
) -> State:
    """A rank is lost: note it, and let no worker of this generation live on."""
    before = state.failure  # set when a recovery is under way: this is a failure within it
    failure = Failure(
        rank=rank,
        how=how,
        detail=detail,
        retry=retry,
        happened_at=before.happened_at if before is not None else state.fault_at,
        known_at=before.known_at if before is not None else turn.clock.monotonic_s,
        after_step=before.after_step if before is not None else state.step,
    )
    turn.record(_lost(state, failure, turn))
    turn.send_all(state.agents, say.KillWorkers(generation=state.generation))
    deadline = turn.clock.monotonic_s + state.setup.fence_timeout_s
    state = replace(state, phase="fencing", failure=failure, symptom=None, deadline_s=deadline)
    return _when_all_gone(state, turn)


def _lost(state: State, failure: Failure, turn: _Turn) -> log.WorkerLost:
    rank = state.ranks[failure.rank]
    return log.WorkerLost(
        at=turn.clock.unix_s,
        generation=state.generation,
        rank=failure.rank,
        node=state.setup.node_of(failure.rank),
        pid=rank.pid,
        how=failure.how,
        detail=failure.detail,
        last_step=rank.step,
    )


def _when_all_gone(state: State, turn: _Turn) -> State:
    if state.phase == "over" or not state.ranks or any(rank.alive for rank in state.ranks):
        return state
    if state.phase == "fencing":
        return _after_fence(state, turn)
    if all(rank.completed for rank in state.ranks):
        return _complete(state, turn)
    return state


def _after_fence(state: State, turn: _Turn) -> State:
    """No worker of the old generation lives: start again, or say why not."""
    failure = state.failure
    assert failure is not None
    if state.stop_by is not None:
        reason = f"stopped by {state.stop_by} before a step boundary: {failure.how}"
        return _give_up(state, "interrupted", reason, turn)
    # A step that one rank is through was taken by all, even if not all have said so yet.
    reached = max([state.furthest_step, *(rank.step for rank in state.ranks)])
    in_a_row = 1 if reached > state.failed_at_step else state.restarts_in_a_row + 1
    blame = f"rank {failure.rank}: {failure.how}"
    if not failure.retry:
        return _give_up(state, "failed", blame, turn)
    never_worked = state.restarts == 0 and state.furthest_step == 0
    if never_worked and state.ranks[failure.rank].crashed is not None:
        return _give_up(state, "failed", f"{blame} (before its first step)", turn)
    if in_a_row > state.setup.max_restarts:
        tried = f"{state.setup.max_restarts} restart(s) got no further than step "
        return _give_up(state, "failed", f"{blame}; {tried}{reached}", turn)
    state = replace(
        state,
        failure=replace(failure, fenced_at=turn.clock.monotonic_s),
        restarts=state.restarts + 1,
        restarts_in_a_row=in_a_row,
        failed_at_step=reached,
    )
    return _gather(state, turn)


# Ending.


def _complete(state: State, turn: _Turn) -> State:
    """Every rank has a completion record: do they agree, and on what was asked for?"""
    records = [rank.completed for rank in state.ranks if rank.completed is not None]
    worlds = sorted({record.world_size for record in records})
    if worlds != [state.setup.num_ranks]:
        reason = f"asked for {state.setup.num_ranks} ranks, the workers saw {worlds}"
        return _give_up(state, "failed", reason, turn)
    digests = {record.state_digest for record in records}
    if len(digests) > 1:
        return _give_up(state, "failed", "the ranks ended with different parameters", turn)
    if len({(record.outcome, record.step) for record in records}) > 1:
        return _give_up(state, "failed", "the ranks ended at different steps", turn)
    if state.failure is not None:  # it came after the last step, so no step ended the recovery
        turn.record(_recovered(state, state.failure, turn.clock))
    if records[0].outcome == "finished":
        return _give_up(state, "finished", None, turn)
    by = state.stop_by or "a signal to a worker"
    return _give_up(state, "interrupted", f"stopped by {by}", turn)


def _give_up(state: State, outcome: Outcome, reason: str | None, turn: _Turn) -> State:
    """The run is over, well or not."""
    records = [rank.completed for rank in state.ranks]
    known = [record for record in records if record is not None]
    first = known[0] if known else None
    everyone = known if len(known) == state.setup.num_ranks else []
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
            baseline_bytes=[record.baseline_bytes for record in everyone],
            peak_bytes=[record.peak_bytes for record in everyone],
        )
    )
    turn.send_all(state.agents, say.KillWorkers(generation=state.generation))
    turn.send_all(state.agents, say.Leave())
    return replace(state, phase="over", outcome=outcome, reason=reason)


def _stop_wanted(state: State, by: str, turn: _Turn) -> State:
    turn.record(log.StopAsked(at=turn.clock.unix_s, generation=state.generation, by=by))
    state = replace(state, stop_by=by, stops=state.stops + 1)
    if state.phase == "gathering":
        return _give_up(state, "interrupted", f"stopped by {by} before training", turn)
    if state.phase == "fencing":
        if state.stops > 1:
            _force_fence(state, turn)
        return state
    if state.stops > 1:
        return _fail(
            state, 0, f"asked to stop at once by {by}", detail=None, retry=False, turn=turn
        )
    for rank in range(len(state.ranks)):
        _tell(state, rank, say.StopAtBoundary(), turn)
    return replace(state, deadline_s=turn.clock.monotonic_s + state.setup.grace_s)


def _tick(state: State, turn: _Turn) -> State:
    now, symptom = turn.clock.monotonic_s, state.symptom
    if symptom is not None and now - symptom.since_s > state.setup.cause_timeout_s:
        return _fail_of_symptom(state, turn)
    if state.deadline_s is None or turn.clock.monotonic_s < state.deadline_s:
        return state
    if state.phase == "fencing":
        _force_fence(state, turn)
        return replace(state, deadline_s=now + state.setup.fence_timeout_s)
    if state.phase == "gathering":
        missing = sorted(set(range(state.setup.num_nodes)) - state.agents)
        waited = f"{state.setup.agent_timeout_s:.0f} s"
        return _give_up(state, "failed", f"no agent on node(s) {missing} within {waited}", turn)
    if state.stop_by is not None:
        how = f"no step boundary within the grace of {state.setup.grace_s:.0f} s"
        return _fail(state, 0, how, detail=None, retry=False, turn=turn)
    return state


def _force_fence(state: State, turn: _Turn) -> None:
    """Agents that still have workers do not answer: end them, and the kernel ends their workers."""
    nodes = {state.setup.node_of(n) for n, rank in enumerate(state.ranks) if rank.alive}
    turn.actions.extend(KillAgent(node) for node in sorted(nodes))


def _tell(state: State, rank: int, message: say.ToWorker, turn: _Turn) -> None:
    if state.ranks[rank].alive:
        tell = say.Tell(generation=state.generation, rank=rank, message=message)
        turn.send(state.setup.node_of(rank), tell)


def _with_rank(state: State, rank: int, **changes: object) -> State:
    ranks = list(state.ranks)
    ranks[rank] = replace(ranks[rank], **changes)  # type: ignore[arg-type]
    return replace(state, ranks=tuple(ranks))
