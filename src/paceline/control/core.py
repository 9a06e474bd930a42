"""The controller's mind: `decide(state, event, clock) -> actions`, and nothing else.

No clock, no socket, no file: the same events make the same state and the same actions. The shell in
`controller.py` feeds it what happened and carries out what it answers; tests and simulations run
this very code.

A worker is lost -> the others are interrupted and park with what they hold -> the empty slots get
spares or new processes -> all join the next generation, and bring each other to the newest step.

What follows from each event is in modules of their own. They are as pure as this one, change the
state they are given, and add to one decision in the making (`decision.py`). Each uses only those
above it:

    rank_assignment  who has which rank, and who is still waited for
    start_workers    processes are started and ended
    ending           the run ends
    drilling         faults that a drill asked for
    resizing         the world shrinks and grows; workers leave
    interrupting     a generation is left, in two moves
    forming          slots are filled, and a generation joins
    worker_loss      workers are lost
    stalls           ranks that stand still or are slow
    progress         state is back, steps are done, ranks are through
    worker_messages  what workers say
    deadlines        what is due by now
"""

from typing import assert_never

from paceline.control import messages as say
from paceline.control.deadlines import tick, took_over
from paceline.control.decision import Decision
from paceline.control.ending import stop_wanted
from paceline.control.forming import begin, go_on
from paceline.control.stalls import worker_seen, worker_stuck
from paceline.control.state import (
    Action,
    AgentJoined,
    AgentLost,
    Begin,
    Clock,
    Happening,
    State,
    StopWanted,
    Tick,
    TookOver,
)
from paceline.control.worker_loss import agent_lost, worker_gone
from paceline.control.worker_messages import to_record, worker_said
from paceline.job.fault_grammar import parse_fault
from paceline.record import events as log


def decide(state: State, event: Happening, clock: Clock) -> list[Action]:
    """Advance the state, and say what to do now.

    Never raises for anything an agent can send: what does not fit the state, is of a worker that is
    no more, or of an older generation, changes nothing.
    """
    decision = Decision(state, clock)
    if state.phase == "over":
        return []
    match event:
        case Begin():
            begin(state, decision)
        case TookOver(away_s):
            took_over(state, away_s, decision)
        case AgentJoined(node=node):
            state.agents.add(node)
            state.leaving.discard(node)
            state.agents_due_s.pop(node, None)
            go_on(state, decision)
        case AgentLost():
            agent_lost(state, event, decision)
        case StopWanted(by):
            stop_wanted(state, by, decision)
        case Tick():
            tick(state, decision)
        case say.ForRecord(event=reported):
            to_record(state, reported, decision)
        case say.Stuck(seen=seen):
            if seen.worker in state.workers:
                worker_stuck(state, seen, decision)
        case say.Started() | say.Exited() | say.Said() | say.FaultDone() | say.Seen():
            if event.worker in state.workers:
                _from_agent(state, event, decision)
        case _:
            assert_never(event)
    return decision.actions


def _from_agent(
    state: State,
    event: say.Started | say.Exited | say.Said | say.FaultDone | say.Seen,
    decision: Decision,
) -> None:
    worker = state.workers[event.worker]
    match event:
        case say.Started(pid=pid):
            worker.pid = pid
            decision.record(log.WorkerStarted(rank=worker.rank, node=worker.node, pid=pid))
        case say.Exited():
            worker_gone(state, event.worker, event, decision)
        case say.FaultDone():
            decision.record(
                log.FaultInjected(
                    fault=event.fault,
                    rank=worker.rank if worker.rank is not None else -1,
                    pid=event.pid,
                )
            )
            if parse_fault(event.fault).row.end in ("recovers", "stops"):
                state.fault_at = event.monotonic_s
        case say.Said():
            worker_said(state, event, decision)
        case say.Seen():
            worker_seen(state, event, decision)
