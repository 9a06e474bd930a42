"""Workers are lost or leave by themselves: what is known of it is noted, and the others go on.

Leaves out what a loss means and what is done about it (`policy.py`), and how the next generation
comes to be (`forming.py`).
"""

from paceline.control import messages as say
from paceline.control import policy, world
from paceline.control.decision import Decision
from paceline.control.drilling import fault_while_parked
from paceline.control.ending import give_up
from paceline.control.error_texts import names_want_of_memory
from paceline.control.forming import go_on, join_if_all_wait
from paceline.control.interrupting import heard, interrupt
from paceline.control.policy import Cause, Verdict, note
from paceline.control.rank_assignment import release, remove_worker, set_slots
from paceline.control.resizing import begin_regroup
from paceline.control.start_workers import fence, start_agent
from paceline.control.state import AgentLost, Failure, KillAgent, State, Symptom
from paceline.errors import CrashLoop
from paceline.record import events as log


def worker_parked(state: State, number: int, message: say.Parked, decision: Decision) -> None:
    """A worker has left its generation: as it was told to, as all agreed, or by itself."""
    worker = state.workers[number]
    if worker.is_fenced:
        return
    worker.waits, worker.holds = True, message.applied_step >= 0
    at_work = state.phase in ("joining", "training")
    as_agreed = message.planned and at_work and state.regroup is not None
    if as_agreed and worker.rank is not None:
        assert state.regroup is not None
        begin_regroup(state, state.regroup, decision)
        go_on(state, decision)  # which may begin the next generation, where all others wait
    elif worker.rank is None:
        go_on(state, decision)
    elif at_work:
        peer_lost(state, number, "left its generation", decision)
    else:
        heard(state, number, worker.generation, decision)
        fault_while_parked(state, worker.rank, decision)
        join_if_all_wait(state, decision)


def peer_lost(state: State, number: int, reason: str, decision: Decision) -> None:
    """A worker lost its connection to another rank, and the cause is still to be known."""
    rank, is_fenced = state.workers[number].rank, state.workers[number].is_fenced
    if rank is None or is_fenced:
        return
    if state.phase in ("joining", "training") and state.symptom is None:
        state.symptom = Symptom(rank, reason, decision.clock.monotonic_s)
    elif state.phase == "forming":  # it waits to be let out, though all leave as agreed
        interrupt(state, decision)


def worker_crashed(state: State, number: int, crash: say.Crashed, decision: Decision) -> None:
    """A worker's own exception. A sound process tries again; a second time it is replaced."""
    worker = state.workers[number]
    if worker.rank is None or worker.is_fenced:
        return  # a spare: its exit follows
    if state.phase in ("joining", "training", "forming"):
        how = f"{crash.kind}: {crash.message}" if crash.message else crash.kind
        if names_want_of_memory(how):
            how = f"out of memory: {how}"
        handle_loss(state, [number], how, decision, crash=crash, ends=not crash.parks)


def worker_gone(state: State, number: int, end: say.Exited, decision: Decision) -> None:
    """A process has ended."""
    worker = state.workers[number]
    holds = worker.rank is not None and state.slots[worker.rank].worker == number
    if holds and not worker.is_fenced and state.phase != "clearing":
        cause: Cause = "out of memory" if end.out_of_memory else "process"
        worker.is_fenced = True
        how = policy.how_it_ended(end.returncode, out_of_memory=end.out_of_memory)
        if end.returncode >= 0:
            how += " without a completion record"
        handle_loss(state, [number], how, decision, cause=cause)
    if state.phase != "over":
        remove_worker(state, number)
        go_on(state, decision)


def agent_lost(state: State, event: AgentLost, decision: Decision) -> None:
    """Workers die with their agent. One that cannot be reached ends them when its lease is over;
    until then their ranks are nobody's."""
    node = event.node
    state.agents.discard(node)
    decision.actions.append(KillAgent(node))  # only the connection may be gone
    mine = [number for number, worker in state.workers.items() if worker.node == node]
    ranked = [number for number in mine if state.workers[number].rank is not None]
    for number in mine:
        if number not in ranked:
            remove_worker(state, number)
    for number in ranked:
        worker = state.workers[number]
        worker.is_fenced = True
        if event.in_doubt_s and worker.generation and worker.rank is not None:
            state.in_doubt_s[worker.rank] = decision.clock.monotonic_s + event.in_doubt_s
    if ranked and state.phase != "clearing":
        handle_loss(state, ranked, f"node {node} is lost", decision, cause="node")
    if state.phase == "over":
        return
    for number in ranked:
        remove_worker(state, number)
    if node not in state.away_until_s:
        start_agent(state, node, decision)
    go_on(state, decision)


def gpu_fails(state: State, node: int, decision: Decision) -> None:
    """A sign that a GPU fails is a strike against its node: the ranks there work on, and go to
    other nodes when they are lost."""
    strikes = policy.sign(state.history, node, state.setup.rules, decision.clock.monotonic_s)
    if strikes:
        _note_set_aside(state, node, strikes, decision)


def went_back(state: State, repair: log.CorruptionFound, decision: Decision) -> None:
    """All ranks went back to make a wrong state right, which has a bound as restarts have."""
    step, back_to = repair.step, repair.goes_on_after
    reason = policy.note_repair(state.history, state.setup.rules, step=step, back_to=back_to)
    if reason is not None:
        state.failure = Failure(
            rank=min([*repair.ranks, *repair.suspects], default=0),
            how=reason,
            happened_at=None,
            known_at=decision.clock.monotonic_s,
            after_step=step,
            exit_code=CrashLoop.exit_code,
        )
        give_up(state, "failed", reason, decision)


def handle_loss(
    state: State,
    lost: list[int],
    how: str,
    decision: Decision,
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
        verdict = _judge(state, loss, decision, without=lost if ends else [])
    else:
        verdict = Verdict(cause=note(state.history, loss), rung="replace process")
    _note_loss(state, loss, verdict.cause, crash.where if crash is not None else detail, decision)
    if state.failure is None:
        state.failure = _failure(state, loss, decision)
    state.fault_at = None
    state.failure.exit_code = verdict.exit_code
    if verdict.rung == "stop":
        why = f" ({detail.splitlines()[0]})" if detail else ""
        give_up(state, "failed", f"{verdict.reason}{why}", decision)
        return
    _note_measures(state, loss, verdict, decision)
    if at_work:
        state.restarts += 1
        state.generation += 1
        state.waiting_faults = []
        state.phase, state.symptom, state.regroup = "forming", None, None
        state.form_deadline_s = None
    is_sound = crash is None or (crash.parks and verdict.rung in ("retry", "skip"))
    for number in lost:
        _vacate(state, number, decision, ends=ends or (at_work and not is_sound))
    if state.phase == "forming":
        interrupt(state, decision)
    if verdict.rung == "clear":
        _clear(state, decision)
    go_on(state, decision)


def _loss(
    state: State, number: int, how: str, cause: Cause, crash: say.Crashed | None
) -> policy.Loss:
    worker = state.workers[number]
    assert worker.rank is not None
    if crash is not None:
        cause = policy.cause_of(how)
    return policy.Loss(
        slot=worker.rank, node=worker.node, worker=number, how=how, cause=cause, crash=crash
    )


def _judge(state: State, loss: policy.Loss, decision: Decision, *, without: list[int]) -> Verdict:
    # A step that one rank is through was taken by all, even if not all have said so yet.
    advanced = any(slot.last_step for slot in state.slots)
    restored = [slot.restored.first_step - 1 for slot in state.slots if slot.restored is not None]
    return policy.judge(
        state.history,
        loss,
        state.setup.rules,
        reached=max((slot.step for slot in state.slots), default=0) or state.furthest_step,
        now_s=decision.clock.monotonic_s,
        resumed_at=max(restored, default=None),
        advanced=advanced and state.phase in ("joining", "training"),
        state_lives=world.state_lives(state, without),
    )


def _note_loss(
    state: State, loss: policy.Loss, cause: Cause, detail: str | None, decision: Decision
) -> None:
    decision.record(
        log.WorkerLost(
            rank=loss.slot,
            node=loss.node,
            pid=state.workers[loss.worker].pid,
            how=loss.how,
            detail=detail,
            last_step=state.slots[loss.slot].step,
            cause=cause,
        )
    )


def _failure(state: State, loss: policy.Loss, decision: Decision) -> Failure:
    happened_at, state.fault_at = state.fault_at, None
    return Failure(
        rank=loss.slot,
        how=loss.how,
        happened_at=happened_at,
        known_at=decision.clock.monotonic_s,
        after_step=max(state.step, state.furthest_step),
    )


def _note_measures(state: State, loss: policy.Loss, verdict: Verdict, decision: Decision) -> None:
    if verdict.strikes:
        _note_set_aside(state, loss.node, verdict.strikes, decision)
    if verdict.rung == "skip":
        step, samples = list(state.history.poison.items())[-1]
        decision.record(log.BatchSkipped(step=step, samples=list(samples)))


def _note_set_aside(state: State, node: int, strikes: int, decision: Decision) -> None:
    decision.record(
        log.NodeSetAside(
            node=node,
            strikes=strikes,
            window_s=state.setup.strike_window_s,
            is_only=state.setup.num_nodes == 1,
        )
    )


def _vacate(state: State, number: int, decision: Decision, *, ends: bool) -> None:
    """Take the slot from a worker that ends; one that does not keeps it."""
    worker = state.workers[number]
    if ends and not worker.is_fenced:
        fence(state, worker, decision)
        decision.send(worker.node, say.KillWorker(worker=number))
    if ends:
        release(state, number)


def _clear(state: State, decision: Decision) -> None:
    """The last resort: every process anew, from a checkpoint."""
    state.phase = "clearing"
    decision.send_all(state.agents, say.KillWorkers())
    for worker in state.workers.values():
        if not worker.is_fenced:
            fence(state, worker, decision)
    set_slots(state, 0)
    state.unheard = None
    state.form_deadline_s = None
