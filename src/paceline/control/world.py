"""Who takes which rank when the world changes its size, and how large it can be. Pure.

A run shrinks when a rank cannot be filled, and grows back when processes for it are ready. Whoever
holds a part of the state takes a rank that needs that part, so that as little as possible has to be
brought from elsewhere.
"""

from collections import Counter

from paceline.control.rank_assignment import assign, set_slots
from paceline.control.state import State
from paceline.parallel.layout import Layout
from paceline.parallel.shrink import part_of, shrunk


def available(state: State) -> list[int]:
    """Workers that live and may have a rank in the next generation."""
    return [
        number
        for number, worker in state.workers.items()
        if not worker.is_fenced and not worker.leaves
    ]


def free_nodes(state: State) -> list[int]:
    """Nodes whose agent is there with a place for one more rank: one entry a place, nodes that were
    set aside last."""
    aside, per_node = state.history.set_aside, state.setup.ranks_per_node
    taken = Counter(
        worker.node
        for worker in state.workers.values()
        if worker.rank is not None and not worker.is_fenced and not worker.leaves
    )
    places: list[int] = []
    for node in sorted(state.agents - state.leaving, key=lambda node: (node in aside, node)):
        places += [node] * max(0, per_node - taken[node])
    return places


def smaller(state: State) -> Layout | None:
    """The layout that the workers which live can fill and have the memory for, or None when there
    is none."""
    if state.setup.split is None or not state.setup.shrink:
        return None
    found = shrunk(state.setup.split, len(available(state)), state.setup.batch)
    if found is None or not state.setup.least_ranks <= found.num_ranks < len(state.slots):
        return None
    return found


def larger(state: State) -> Layout | None:
    """The layout that those at work and those ready can fill; None when it is no larger, or when
    more processes are about to be ready."""
    if state.setup.split is None or state.split is None:
        return None
    spare = [n for n in available(state) if state.workers[n].rank is None]
    if any(not state.workers[number].waits for number in spare):
        return None
    found = shrunk(state.setup.split, len(state.slots) + len(spare), state.setup.batch)
    return found if found is not None and found.num_ranks > len(state.slots) else None


def num_spare(state: State) -> int:
    """Workers without a rank that can take one, ready or about to be."""
    return sum(state.workers[number].rank is None for number in available(state))


def is_kept_by_others(state: State) -> bool:
    """Whether what the leaving workers hold is held by one that stays."""
    members = [state.workers[slot.worker] for slot in state.slots if slot.worker is not None]
    kept = {worker.part for worker in members if not worker.leaves}
    return all(worker.part in kept for worker in members if worker.leaves)


def state_lives(state: State, lost: list[int]) -> bool:
    """Whether the ranks' workers, but these, hold every part of the state."""
    layout = layout_of(state)
    if layout is None:  # which rank holds what is not known here
        return False
    held = {
        worker.part
        for number, worker in state.workers.items()
        if worker.holds and number not in lost and not worker.is_fenced
    }
    return all(part_of(layout, rank) in held for rank in range(layout.num_ranks))


def resize(state: State, layout: Layout) -> None:
    """Give the ranks of a layout to the workers that live; the others become spares."""
    full = state.setup.split
    state.split = None if layout == full else layout
    before = {number: state.workers[number].rank for number in state.workers}
    pool = available(state)
    set_slots(state, layout.num_ranks)
    aside = state.history.set_aside
    for rank in range(layout.num_ranks):
        part, home = part_of(layout, rank), state.setup.node_of(rank)

        costs = [
            (
                state.workers[number].part != part,
                state.workers[number].node in aside,
                state.workers[number].node != home,
                before[number] is None,
                before[number] or 0,
                number,
            )
            for number in pool
        ]
        if costs:
            taken = min(costs)[-1]
            pool.remove(taken)
            assign(state, taken, rank)


def layout_of(state: State) -> Layout | None:
    """The layout of the generation that is forming or at work, where it is known."""
    return state.split or state.setup.split
