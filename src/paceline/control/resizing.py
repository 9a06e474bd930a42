"""The world becomes smaller or larger, and workers that will be taken away leave it.

A world that shrinks because a rank stays empty does so while it is forming. All other changes are
asked for and happen at a step boundary, where every rank leaves its generation.

Leaves out who takes which rank, and how large the world can be (`world.py`).
"""

from paceline.control import messages as say
from paceline.control import world
from paceline.control.decision import Decision, tell_all
from paceline.control.drilling import faults_out_of_reach
from paceline.control.ending import stop_wanted
from paceline.control.rank_assignment import release
from paceline.control.start_workers import fence, start_worker
from paceline.control.state import State
from paceline.parallel.layout import Layout
from paceline.record import events as log
from paceline.units import counted, format_seconds, numbered


def shrink_if_short(state: State, decision: Decision) -> None:
    """Go on with fewer ranks, when some have been empty for long enough."""
    if state.in_doubt_s or not state.empty:
        state.short_since_s = None
        return
    if state.short_since_s is None:
        state.short_since_s = decision.clock.monotonic_s
    waited_s = decision.clock.monotonic_s - state.short_since_s
    if waited_s < state.setup.replace_timeout_s:
        return
    layout = world.smaller(state)
    if layout is not None:
        away = sorted(set(range(state.setup.num_nodes)) - state.agents)
        waited = format_seconds(waited_s)
        reason = f"{numbered('node', away)} stayed away for {waited} and no spare is left"
        _resize(state, layout, reason, decision)


def grow_if_ready(state: State, decision: Decision) -> None:
    """Ask all to leave at a step boundary, once there are processes for a larger world."""
    if state.regroup is not None or state.stop_by is not None:
        return
    layout = world.larger(state)
    if layout is not None:
        _regroup(state, layout, decision, save=False)


def leave_wanted(state: State, number: int, decision: Decision, *, with_node: bool) -> None:
    """A worker will be taken away: a spare takes its rank at the next step boundary, or a new
    process where its node stays, or the world shrinks there, or else the run stops there and
    saves."""
    leaver = state.workers[number]
    if leaver.is_fenced or leaver.leaves:
        return
    leaver.leaves = True
    mine = [worker for worker in state.workers.values() if worker.node == leaver.node]
    with_node = with_node or all(worker.leaves for worker in mine)
    if with_node and state.setup.num_nodes > 1:
        state.leaving.add(leaver.node)
    if leaver.rank is None:
        fence(state, leaver, decision)
        decision.send(leaver.node, say.KillWorker(worker=number))
    ranks = [
        rank
        for rank, slot in enumerate(state.slots)
        if slot.worker is not None and state.workers[slot.worker].leaves
    ]
    at_work = state.phase in ("joining", "training")
    if not ranks or not at_work or state.stop_by is not None:
        return
    layout, told = world.layout_of(state), f"rank {ranks[-1]} is about to be taken away: "
    taker = "another process"
    if layout is not None and len(ranks) > world.num_spare(state):
        if with_node:
            layout = world.smaller(state)
        else:
            start_worker(state, leaver.node, None, decision)
            taker = f"a new process on node {leaver.node}"
    if layout is None:
        _note(state, f"{told}nobody can take its rank", decision)
        stop_wanted(state, f"SIGTERM to rank {ranks[-1]}", decision)
        return
    is_as_large = layout.num_ranks == len(state.slots)
    how = f"its rank goes to {taker}" if is_as_large else "the others go on"
    _note(state, f"{told}{how} at the next step boundary", decision)
    _regroup(state, layout, decision, save=not world.is_kept_by_others(state))


def begin_regroup(state: State, layout: Layout, decision: Decision) -> None:
    """The first rank has left as asked; the others do so at the same boundary."""
    state.generation += 1
    state.phase, state.symptom, state.regroup = "forming", None, None
    state.waiting_faults = []
    state.form_deadline_s = decision.clock.monotonic_s + state.setup.grace_s
    leavers = {number for number, worker in state.workers.items() if worker.leaves}
    gone = [rank for rank, slot in enumerate(state.slots) if slot.worker in leavers]
    for number in leavers:
        release(state, number)
    if layout.num_ranks != len(state.slots):
        reason = "processes for more ranks are ready"
        if layout.num_ranks < len(state.slots):
            reason = f"no spare is left for {numbered('rank', gone)}, whose node is taken away"
        _resize(state, layout, reason, decision)


def _resize(state: State, layout: Layout, reason: str, decision: Decision) -> None:
    world.resize(state, layout)
    state.short_since_s = None
    state.stragglers = None
    state.num_resizes += 1
    decision.record(
        log.WorldChanged(
            num_ranks=layout.num_ranks,
            layout=layout.name,
            reason=reason,
        )
    )
    if waiting := faults_out_of_reach(state):
        left = counted(len(state.slots), "rank")
        told = f"drill: {left} left, too few for {', '.join(f'`{each}`' for each in waiting)}"
        _note(state, f"{told}: it happens only if the world grows again", decision)
    if state.split is not None:
        _promise_of_smaller(state, state.split, decision)


def _promise_of_smaller(state: State, layout: Layout, decision: Decision) -> None:
    """What a world that is smaller than planned means for the end of the run; said once."""
    full, ranks = state.setup.split, f"{counted(layout.data, 'data rank')}"
    change = log.ExactnessChanged(
        exactness="numeric",
        reason=f"the batch is added up over {ranks}",
        tolerance=state.setup.tolerance,
    )
    if full is not None and layout.global_batch != full.global_batch:
        change = log.ExactnessChanged(
            exactness="different",
            reason=f"{ranks} had a global batch of {layout.global_batch} instead of "
            f"{full.global_batch}",
            tolerance=None,
        )
    decision.promise_less(change)


def _regroup(state: State, layout: Layout, decision: Decision, *, save: bool) -> None:
    state.regroup = layout
    tell_all(state, say.RegroupAtBoundary(generation=state.generation, save=save), decision)


def _note(state: State, text: str, decision: Decision) -> None:
    decision.record(log.Noted(text=text))
