"""Who has which rank, and which ranks something is still waited for from: the only place where
that is kept, so that a message costs as much at thousands of ranks as at two.

`State.empty` and `State.unranked` follow from the slots and the workers; only what is here changes
them together. Pure.
"""

from collections.abc import Callable
from typing import Literal

from paceline.control.state import Slot, State, Worker

Awaited = Literal["waits", "met", "restored", "completed"]
"""What a generation waits for, of all its ranks."""


def set_slots(state: State, num_ranks: int) -> None:
    """As many empty slots; nobody has a rank."""
    state.slots = [Slot() for _ in range(num_ranks)]
    state.empty = set(range(num_ranks))
    for worker in state.workers.values():
        worker.rank = None
    state.unranked = set(state.workers)
    state.witness = {}


def add_worker(state: State, number: int, worker: Worker) -> None:
    """A worker without a rank lives from now on."""
    state.workers[number] = worker
    state.unranked.add(number)


def remove_worker(state: State, number: int) -> None:
    """A worker is no more; harmless when it is not known."""
    if number in state.workers:
        release(state, number)
        state.unranked.discard(number)
        _expect_no_answer(state, number)
        del state.workers[number]


def assign(state: State, number: int, rank: int) -> None:
    """Give an empty slot to a worker without a rank."""
    state.slots[rank].worker = number
    state.workers[number].rank = rank
    state.empty.discard(rank)
    state.unranked.discard(number)


def release(state: State, number: int) -> None:
    """Take its slot from a worker, if it has one."""
    worker = state.workers[number]
    if worker.rank is None:
        return
    state.slots[worker.rank].worker = None
    state.empty.add(worker.rank)
    worker.rank = None
    state.unranked.add(number)
    _expect_no_answer(state, number)


def _expect_no_answer(state: State, number: int) -> None:
    if state.unheard is not None:
        state.unheard.discard(number)


def is_true_of_all(state: State, what: Awaited, holds: Callable[[Slot], bool]) -> bool:
    """Whether every slot is through with this.

    A rank that was not is remembered and asked first, so that hearing of all ranks one by one
    looks at each about twice, and not at all of them each time. What is remembered only says where
    to begin: the answer never depends on it.
    """
    num_ranks = len(state.slots)
    first = state.witness.get(what, 0)
    for rank in range(first, first + num_ranks):
        if not holds(state.slots[rank % num_ranks]):
            state.witness[what] = rank % num_ranks
            return False
    return True
