"""From agents that are there to a generation at work: slots are filled, and all join.

Leaves out what brings a generation to its end (`worker_loss.py`, `resizing.py`).
"""

from paceline.control import messages as say
from paceline.control import world
from paceline.control.decision import Decision, tell
from paceline.control.drilling import faults_due_now
from paceline.control.interrupting import abort_when_all_heard
from paceline.control.rank_assignment import is_true_of_all, set_slots
from paceline.control.resizing import grow_if_ready, shrink_if_short
from paceline.control.start_workers import fence, fill_slots, keep_spares, start_agent
from paceline.control.state import Slot, State, Worker
from paceline.parallel.shrink import part_of
from paceline.record import events as log


def begin(state: State, decision: Decision) -> None:
    """The first thing that happens: agents are started, and all their workers with them."""
    setup = state.setup
    decision.record(
        log.RunStarted(
            num_ranks=setup.num_ranks,
            num_nodes=setup.num_nodes,
            num_steps=setup.num_steps,
            resumed=setup.resumed,
            layout=setup.layout,
            arithmetic=setup.arithmetic,
            versions=setup.versions,
        )
    )
    state.generation = setup.first_generation
    state.history.poison.update(setup.skipped)
    state.exactness = setup.exactness
    for change in setup.changes:
        decision.record(change)
    for node in range(setup.num_nodes):
        if node not in state.agents:
            start_agent(state, node, decision)
    go_on(state, decision)


def go_on(state: State, decision: Decision) -> None:
    """Whatever can happen next on the way to a generation at work."""
    if state.phase == "gathering":
        if len(state.agents) < state.setup.num_nodes:
            return
        _form_anew(state)
    if state.phase == "clearing":
        if state.workers:
            return
        _form_anew(state)
    if state.phase == "forming":
        abort_when_all_heard(state, decision)
        fill_slots(state, decision)
        shrink_if_short(state, decision)
        join_if_all_wait(state, decision)
    if state.phase == "training":
        keep_spares(state, decision)
        grow_if_ready(state, decision)


def join_if_all_wait(state: State, decision: Decision) -> None:
    """Begin the next generation when every slot has a worker that waits for it.

    All that a worker with a rank can bring about by being ready or parked.
    """

    def waits(slot: Slot) -> bool:
        return slot.worker is not None and state.workers[slot.worker].waits

    if state.phase == "forming" and is_true_of_all(state, "waits", waits):
        _end_leavers(state, decision)
        if not _waits_for_a_place(state):
            _join(state, decision)


def _end_leavers(state: State, decision: Decision) -> None:
    """Workers that will be taken away have left their generation: what they held, others have."""
    for number, worker in state.workers.items():
        if worker.leaves and not worker.is_fenced:
            fence(state, worker, decision)
            decision.send(worker.node, say.KillWorker(worker=number))


def _waits_for_a_place(state: State) -> bool:
    """Whether a newcomer's node has a worker that was told to die and has not: an accelerator is
    free only when the process that had it has ended. A process with 70 GB there takes a while."""
    ending = {worker.node for worker in state.workers.values() if _is_ending(worker)}
    members = (state.workers[slot.worker] for slot in state.slots if slot.worker is not None)
    return any(worker.node in ending for worker in members if not worker.generation)


def _is_ending(worker: Worker) -> bool:
    return worker.is_fenced and worker.generation > 0


def _form_anew(state: State) -> None:
    state.phase = "forming"
    layout = state.split
    set_slots(state, layout.num_ranks if layout else state.setup.num_ranks)


def _join(state: State, decision: Decision) -> None:
    """Every slot has a worker that waits: they are a generation now."""
    state.phase, state.symptom = "joining", None
    state.form_deadline_s = decision.clock.monotonic_s + state.setup.meet_limit_s(len(state.slots))
    state.num_at_step, state.own_times, state.own_losses = {}, {}, {}
    state.loss_outliers = None
    state.inquiry = state.step_done_s = None
    if state.stragglers is not None:
        state.stragglers.forget()
    layout, state.regroup = world.layout_of(state), None
    members = [state.workers[slot.worker] for slot in state.slots if slot.worker is not None]
    store = members[0].store
    assert store is not None, "a worker that waits has said where its store is"
    taken = {(each.node, each.local_rank) for each in members if each.generation}
    faults = faults_due_now(state)
    skipped = {step: list(ids) for step, ids in state.history.poison.items()}
    for rank, (slot, worker) in enumerate(zip(state.slots, members, strict=True)):
        if not worker.generation:
            worker.local_rank = _free_place(state, worker.node, rank, taken)
            taken.add((worker.node, worker.local_rank))
        worker.generation, worker.waits = state.generation, False
        worker.part = part_of(layout, rank) if layout is not None else None
        slot.met = slot.restored = slot.completed = None
        slot.last_step = 0
        tell(
            state,
            slot.worker,
            say.Join(
                generation=state.generation,
                rank=rank,
                local_rank=worker.local_rank,
                world_size=len(state.slots),
                host=store[0],
                port=store[1],
                faults=faults,
                layout=layout,
                skipped=skipped,
                is_first=state.generation == state.setup.first_generation,
            ),
            decision,
        )
    if state.failure is not None:
        state.failure.formed_at = decision.clock.monotonic_s


def _free_place(state: State, node: int, rank: int, taken: set[tuple[int, int]]) -> int:
    """The accelerator a worker takes on its node: that of the rank, if it is free."""
    per_node = state.setup.ranks_per_node
    usual = rank % per_node
    order = [usual, *(place for place in range(per_node) if place != usual)]
    return next((place for place in order if (node, place) not in taken), usual)
