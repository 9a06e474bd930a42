"""Ranks that stand still or are slow: all agents are asked, and who is to blame is ended.

Leaves out who that is (`suspicion.py`).
"""

import msgspec

from paceline.control import messages as say
from paceline.control import suspicion
from paceline.control.decision import Decision
from paceline.control.losing import handle_loss
from paceline.control.state import State
from paceline.record import events as log


def worker_stuck(state: State, event: say.Stuck, decision: Decision) -> None:
    """A worker is late. Among ranks at work it may only be waiting for another one."""
    number, worker = event.worker, state.workers[event.worker]
    if worker.is_fenced or event.generation != worker.generation:
        return
    if worker.rank is None:
        worker.is_fenced = True
        decision.send(worker.node, say.KillWorker(worker=number))
    elif state.phase in ("joining", "training") and worker.generation == state.generation:
        if suspicion.wants_a_look(state, event, decision.clock):
            decision.send_all(state.agents, say.Look())
    elif state.phase == "forming" and not worker.generation:
        handle_loss(state, [number], suspicion.how_stuck(event), decision, cause="hang")


def worker_seen(state: State, event: say.Seen, decision: Decision) -> None:
    """What one agent sees of a worker that all agents were asked about."""
    worker = state.workers[event.worker]
    if state.inquiry is not None and worker.rank is not None and not worker.is_fenced:
        if worker.generation == state.generation:
            if event.generation < worker.generation:
                # It was told to join and has not, while others have stood still waiting for it.
                event = msgspec.structs.replace(event, is_late=True)
            state.inquiry.seen[worker.rank] = event
        judge_when_answered(state, decision)


def judge_when_answered(state: State, decision: Decision) -> None:
    """End whoever the others wait for, once all agents or enough time have told."""
    if state.phase not in ("joining", "training"):
        state.inquiry = None
    if not suspicion.is_answered(state, decision.clock):
        return
    verdict = suspicion.judge(state)
    if verdict is None:
        return
    for event in verdict.events:
        decision.record(event)
    numbers = [state.slots[rank].worker for rank in verdict.ranks or range(len(state.slots))]
    lost = [number for number in numbers if number is not None]
    if verdict.ranks:
        handle_loss(state, lost, verdict.how, decision, cause="hang")
    elif lost:  # nobody is to blame: all leave, and meet again
        handle_loss(state, lost[:1], verdict.how, decision, cause="network", ends=False)


def note_speed(state: State, rank: int, step: int, own_s: float | None, decision: Decision) -> None:
    """Take a rank's own time of a step, and end one that is slow when that pays."""
    if state.phase != "training":
        return
    for one in suspicion.note_own_time(state, rank, step, own_s):
        number = state.slots[one.rank].worker
        if number is None:
            continue
        evicts = suspicion.is_worth_evicting(state, one, step, state.step_s)
        decision.record(
            log.StragglerNamed(
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
            handle_loss(state, [number], how, decision, cause="slow")
            return
