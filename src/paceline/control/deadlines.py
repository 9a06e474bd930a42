"""What the clock brings about: whatever is waited for only so long is due, or is put off.

Leaves out what is measured on workers (`adaptive_timeouts.py`, in their agents).
"""

from dataclasses import replace

from paceline.control import messages as say
from paceline.control import world
from paceline.control.decision import Decision
from paceline.control.ending import end_all_agents, give_up
from paceline.control.forming import go_on
from paceline.control.stalls import judge_when_answered
from paceline.control.start_workers import fence, start_agent
from paceline.control.state import KillAgent, State, Symptom
from paceline.control.worker_loss import handle_loss
from paceline.record import events as log
from paceline.units import numbered


def tick(state: State, decision: Decision) -> None:
    """Time has passed: whatever is due by now."""
    now = decision.clock.monotonic_s
    judge_when_answered(state, decision)
    symptom = state.symptom
    if symptom is not None and now - symptom.since_s > state.setup.cause_timeout_s:
        _regroup_of_symptom(state, symptom, decision)
    if state.stop_deadline_s is not None and now >= state.stop_deadline_s:
        end_all_agents(state, decision)
        grace = f"{state.setup.grace_s:.0f} s"
        reason = f"stopped by {state.stop_by}: no step boundary within the grace of {grace}"
        give_up(state, "interrupted", reason, decision)
        return
    _end_agents_that_do_not_obey(state, decision)
    certain = [rank for rank, until_s in state.in_doubt_s.items() if now >= until_s]
    for rank in certain:
        del state.in_doubt_s[rank]
    if certain:
        go_on(state, decision)
    overdue = sorted(node for node, due_s in state.agents_due_s.items() if now >= due_s)
    if state.phase == "forming":
        go_on(state, decision)
    if overdue and _is_needed(state, overdue) and world.smaller(state) is None:
        waited = f"{state.setup.agent_timeout_s:.0f} s"
        give_up(
            state, "failed", f"no agent on {numbered('node', overdue)} within {waited}", decision
        )
        return
    for node in [node for node, until in state.away_until_s.items() if now >= until]:
        del state.away_until_s[node]
        start_agent(state, node, decision)
    for node in overdue:
        decision.actions.append(KillAgent(node))
        start_agent(state, node, decision)
    is_late = state.form_deadline_s is not None and now >= state.form_deadline_s
    if is_late and not state.in_doubt_s:  # while a node's ranks are, nobody is waited for alone
        state.form_deadline_s = None
        _fence_the_late(state, decision)


def took_over(state: State, away_s: float, decision: Decision) -> None:
    """Nobody is late for having waited for a controller."""
    state.epoch += 1
    decision.record(
        log.ControllerReplaced(
            epoch=state.epoch,
            away_s=away_s,
        )
    )
    for node in state.agents_due_s:
        start_agent(state, node, decision)  # whether or not the last one came to it
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


def _regroup_of_symptom(state: State, symptom: Symptom, decision: Decision) -> None:
    """Nobody's own end explains the lost connection: all that is known is who lost it."""
    number = state.slots[symptom.rank].worker
    state.symptom = None
    if number is not None and state.phase in ("joining", "training"):
        how = "lost the connection to another rank"
        handle_loss(
            state, [number], how, decision, cause="network", detail=symptom.reason, ends=False
        )


def _end_agents_that_do_not_obey(state: State, decision: Decision) -> None:
    """The kernel then ends their workers."""
    now = decision.clock.monotonic_s
    nodes = set()
    for worker in state.workers.values():
        if worker.fence_by_s is not None and now >= worker.fence_by_s:
            worker.fence_by_s = now + state.setup.fence_timeout_s
            nodes.add(worker.node)
    decision.actions.extend(KillAgent(node) for node in sorted(nodes))


def _is_needed(state: State, nodes: list[int]) -> bool:
    """Whether the run cannot go on without one of these nodes."""
    if state.phase in ("gathering", "clearing"):
        return True
    empty = [rank for rank, slot in enumerate(state.slots) if slot.worker is None]
    return any(state.setup.node_of(rank) in nodes for rank in empty)


def _fence_the_silent(state: State, silent: set[int], decision: Decision) -> None:
    """Workers that do not answer an interruption are ended, and the others let out."""
    ranked = sorted(number for number in silent if state.workers[number].rank is not None)
    for number in silent.difference(ranked):
        fence(state, state.workers[number], decision)
        decision.send(state.workers[number].node, say.KillWorker(worker=number))
    silent.intersection_update(ranked)
    if ranked:
        how = "did not answer that its generation is over"
        handle_loss(state, ranked, how, decision, cause="hang")
    else:
        go_on(state, decision)


def _fence_the_late(state: State, decision: Decision) -> None:
    """Workers that should have parked by now are killed; of those that do not meet, one is."""
    if state.phase == "forming" and state.unheard is not None:
        if state.unheard:
            _fence_the_silent(state, state.unheard, decision)
        return  # else those told to die are waited for; their time begins with the `Abort`
    late = [
        number
        for number, worker in state.workers.items()
        if worker.generation and not worker.waits and worker.rank is not None
    ]
    if late and state.phase == "forming":
        how = "did not leave its generation in time"
        handle_loss(state, late, how, decision, cause="hang")
    alone = [slot.worker for slot in state.slots if slot.met is None and slot.worker is not None]
    if alone and state.phase == "joining":
        limit_s = state.setup.meet_limit_s(len(state.slots))
        how = f"did not meet the others within {limit_s:.0f} s"
        # The newest holds the least. It is not shown to be at fault: where one rank cannot be
        # reached, or the network is cut, nobody has met.
        handle_loss(state, [max(alone)], how, decision, cause="network")
