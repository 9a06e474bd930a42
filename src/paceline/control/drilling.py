"""Faults that a drill asked for: when one is due, and to whom it happens.

Leaves out how a worker or an agent makes it happen (`injection.py`).
"""

from paceline.control import messages as say
from paceline.control.decision import Decision, tell
from paceline.control.start_workers import keep_spares
from paceline.control.state import State, Worker
from paceline.job.fault_grammar import parse_fault


def faults_due_now(state: State) -> list[str]:
    """Faults that workers of the next generation may come to: those of a recovery only in one, and
    from their step on."""
    return [
        text
        for text in state.faults
        for fault in [parse_fault(text)]
        if not fault.in_recovery
        or (state.failure is not None and state.furthest_step + 1 >= fault.step)
    ]


def fault_due(state: State, rank: int, text: str, decision: Decision) -> None:
    """A rank stands at the place of a drill's fault, and waits: let it happen to whom it should."""
    if text not in state.faults:
        return
    fault = parse_fault(text)
    if "spare" in (fault.when, fault.kind) and not _spares_ready(state):
        keep_spares(state, decision)
        if any(worker.rank is None for worker in state.workers.values()):
            state.waiting_faults.append((rank, text))
            return
    if fault.sample is None:
        at = state.faults.index(text)
        state.faults = state.faults[:at] + state.faults[at + 1 :]
    trigger = state.slots[rank].worker
    there = range(len(state.slots))
    hit = (each for each in fault.victims(rank) if each in there)
    victims: list[int | None] = [state.slots[each].worker for each in hit]
    if fault.kind == "spare":
        victims = [None, *_spares_ready(state)][1:2]
    if fault.row.is_whole_node and fault.for_s and trigger is not None:
        node = state.workers[trigger].node
        state.away_until_s[node] = decision.clock.monotonic_s + fault.for_s
    for victim in victims:
        if victim is not None:
            decision.send(state.workers[victim].node, say.InjectFault(worker=victim, fault=text))
    dies = trigger in victims and fault.kind in ("kill", "store")
    if fault.row.maker == "agent" and not dies:
        tell(state, trigger, say.Fire(fault=text), decision)


def faults_out_of_reach(state: State) -> list[str]:
    """Faults that wait for a rank which a smaller world does not have."""
    there = range(len(state.slots))
    return [text for text in state.faults if set(parse_fault(text).ranks) - set(there)]


def fault_of_spare(state: State, worker: Worker, decision: Decision) -> None:
    """A worker is ready: what waited for a spare need not wait any more, if it is one."""
    if worker.rank is None and worker.waits:
        waiting, state.waiting_faults = state.waiting_faults, []
        for rank, text in waiting:
            fault_due(state, rank, text, decision)


def fault_while_parked(state: State, rank: int, decision: Decision) -> None:
    """A rank has parked: a drill's fault may be meant for just then."""
    for text in state.faults:
        fault = parse_fault(text)
        if fault.phase == "parked" and fault.ranks[0] == rank and text in faults_due_now(state):
            fault_due(state, rank, text, decision)
            return


def _spares_ready(state: State) -> list[int]:
    """Warm spares that wait for a rank."""
    return [
        number
        for number, worker in state.workers.items()
        if worker.rank is None and worker.waits and not worker.is_fenced
    ]
