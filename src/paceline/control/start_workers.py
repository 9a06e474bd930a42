"""Processes are started, for ranks and as spares, and told to end.

Leaves out what their end means for the run (`worker_loss.py`).
"""

from paceline.control import messages as say
from paceline.control import world
from paceline.control.decision import Decision
from paceline.control.rank_assignment import add_worker, assign
from paceline.control.state import StartAgent, State, Worker

_SPARE_ATTEMPTS = 3
"""Spares that may be lost for each one that is kept, before no more are started. A guess: a spare
that cannot live says so in its first seconds."""


def start_agent(state: State, node: int, decision: Decision) -> None:
    """Have the agent of a node started, and wait for it only so long."""
    decision.actions.append(StartAgent(node))
    state.agents_due_s[node] = decision.clock.monotonic_s + state.setup.agent_timeout_s


def start_worker(state: State, node: int, rank: int | None, decision: Decision) -> int:
    """Have a worker started for a rank, or as a spare: its number."""
    number = state.num_started
    state.num_started += 1
    add_worker(state, number, Worker(node=node))
    if rank is not None:
        assign(state, number, rank)
    decision.send(node, say.StartWorker(worker=number, rank=rank))
    return number


def fill_slots(state: State, decision: Decision) -> None:
    """A spare for every empty slot, or else a new process.

    Ranks whose own node is away come first, and spares are kept for those that may still live
    there: a new process elsewhere needs a place that there seldom is.
    """
    aside = state.history.set_aside
    free: list[int] | None = None
    away = {rank for rank in state.empty if not _is_home_there(state, rank)}
    kept = len(away & state.in_doubt_s.keys())
    for rank in sorted(state.empty - state.in_doubt_s.keys(), key=lambda r: (r not in away, r)):
        home = state.setup.node_of(rank)
        is_there = rank not in away
        spares = [
            (worker.node in aside, worker.node != home, not worker.waits, number)
            for number in state.unranked
            for worker in [state.workers[number]]
            if not worker.is_fenced and not worker.leaves
        ]
        if spares and (rank in away or len(spares) > kept):
            assign(state, min(spares)[-1], rank)
            free = None
        elif is_there and home not in aside:
            start_worker(state, home, rank, decision)
            free = None
        else:
            free = world.free_nodes(state) if free is None else free
            if free:
                start_worker(state, free.pop(0), rank, decision)
            elif is_there:
                start_worker(state, home, rank, decision)


def _is_home_there(state: State, rank: int) -> bool:
    home = state.setup.node_of(rank)
    return home in state.agents and home not in state.leaving


def keep_spares(state: State, decision: Decision) -> None:
    """As many spares as were asked for, on the nodes that have the fewest."""
    setup = state.setup
    spares = [state.workers[number].node for number in state.unranked]
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
        start_worker(state, node, None, decision)
        state.num_spares_started += 1
        spares.append(node)


def fence(state: State, worker: Worker, decision: Decision) -> None:
    """From now on nothing of this worker counts; its end is due before long."""
    worker.is_fenced, worker.waits = True, False
    worker.fence_by_s = decision.clock.monotonic_s + state.setup.fence_timeout_s
