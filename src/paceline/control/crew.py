"""Processes are started, for ranks and as spares, and told to end.

Leaves out what their end means for the run (`losing.py`).
"""

from paceline.control import messages as say
from paceline.control import world
from paceline.control.seats import hire, seat
from paceline.control.state import StartAgent, State, Worker
from paceline.control.turn import Turn

_SPARE_ATTEMPTS = 3
"""Spares that may be lost for each one that is kept, before no more are started. A guess: a spare
that cannot live says so in its first seconds."""


def start_agent(state: State, node: int, turn: Turn) -> None:
    """Have the agent of a node started, and wait for it only so long."""
    turn.actions.append(StartAgent(node))
    state.agents_due_s[node] = turn.clock.monotonic_s + state.setup.agent_timeout_s


def start_worker(state: State, node: int, rank: int | None, turn: Turn) -> int:
    """Have a worker started for a rank, or as a spare: its number."""
    number = state.num_started
    state.num_started += 1
    hire(state, number, Worker(node=node))
    if rank is not None:
        seat(state, number, rank)
    turn.send(node, say.StartWorker(worker=number, rank=rank))
    return number


def fill_slots(state: State, turn: Turn) -> None:
    """A spare for every empty slot, or else a new process."""
    aside = state.history.set_aside
    free: list[int] | None = None
    for rank in sorted(state.empty - state.in_doubt_s.keys()):
        home = state.setup.node_of(rank)
        is_there = home in state.agents and home not in state.leaving
        spares = [
            (worker.node in aside, worker.node != home, not worker.waits, number)
            for number in state.unranked
            for worker in [state.workers[number]]
            if not worker.is_fenced and not worker.leaves
        ]
        if spares:
            seat(state, min(spares)[-1], rank)
            free = None
        elif is_there and home not in aside:
            start_worker(state, home, rank, turn)
            free = None
        else:
            free = world.free_nodes(state) if free is None else free
            if free:
                start_worker(state, free.pop(0), rank, turn)
            elif is_there:
                start_worker(state, home, rank, turn)


def keep_spares(state: State, turn: Turn) -> None:
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
        start_worker(state, node, None, turn)
        state.num_spares_started += 1
        spares.append(node)


def fence(state: State, worker: Worker, turn: Turn) -> None:
    """From now on nothing of this worker counts; its end is due before long."""
    worker.is_fenced, worker.waits = True, False
    worker.fence_by_s = turn.clock.monotonic_s + state.setup.fence_timeout_s
