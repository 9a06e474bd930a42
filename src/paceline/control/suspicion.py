"""What the controller makes of ranks that make no progress, or less than their peers. Pure.

An agent says that one of its workers is late. Who the others wait for only shows when all are
looked at together, so every agent is asked; once all have answered, or long enough after, one
verdict is given (`blame.py`). Nothing of this changes what a generation is: whoever is to be ended
goes the way of any lost worker (`laggards.py`, `losing.py`).
"""

from dataclasses import dataclass

from paceline.control import messages as say
from paceline.control.blame import Fence, NobodyBehind, Sighting, blame
from paceline.control.slots import Phase
from paceline.control.state import Clock, Inquiry, State
from paceline.control.stragglers import Straggler, Stragglers, worth_evicting
from paceline.record import events as log

ANSWER_S = 1.0
"""How long agents may take to answer. Three times the most that tracebacks may take."""

EVICTION_S = 10.0
"""What replacing a rank is reckoned to cost, in seconds. A guess, on the safe side: with a warm
spare it takes about one."""

_PHASES = {phase.words: phase for phase in Phase}


@dataclass(frozen=True, slots=True)
class Stuck:
    """Ranks to be ended, or, when it is nobody's fault, a generation to be formed anew."""

    ranks: tuple[int, ...]
    """Empty when every rank waits for the others."""

    how: str
    events: list[log.AnyEvent]


def wants_a_look(state: State, event: say.Stuck, clock: Clock) -> bool:
    """Whether all agents are to be asked now, for a worker of the generation at work is late."""
    inquiry = state.inquiry
    if inquiry is not None and clock.monotonic_s - inquiry.asked_s < ANSWER_S:
        return False
    state.inquiry = Inquiry(asked_s=clock.monotonic_s)
    return True


def is_answered(state: State, clock: Clock) -> bool:
    """Whether all ranks were seen, or no more answers are waited for."""
    inquiry = state.inquiry
    if inquiry is None:
        return False
    all_seen = len(inquiry.seen) == len(state.slots)
    return all_seen or clock.monotonic_s - inquiry.asked_s >= ANSWER_S


def judge(state: State) -> Stuck | None:
    """Give the verdict, and close the inquiry; None is to wait on."""
    inquiry, state.inquiry = state.inquiry, None
    assert inquiry is not None
    seen = inquiry.seen
    sightings = {
        rank: Sighting(
            step=one.step,
            phase=_PHASES[one.phase],
            micro_batch=one.micro_batch,
            kind=one.kind,
            is_late=one.is_late,
            is_certain=one.is_certain,
            in_collective=one.in_collective,
            collectives=one.collectives or {},
        )
        for rank, one in seen.items()
        if one.phase in _PHASES
    }
    verdict = blame(sightings, num_ranks=len(state.slots), in_order=state.setup.in_order)
    match verdict:
        case Fence(ranks):
            events = [_stuck_event(state, rank, seen[rank]) for rank in ranks]
            return Stuck(ranks, how_stuck(seen[ranks[0]]), list(events))
        case NobodyBehind():
            events = [_stuck_event(state, rank, one) for rank, one in sorted(seen.items())]
            longest = max(seen.values(), key=lambda one: one.waited_s)
            how = f"every rank waits for the others, {_where(longest)}"
            return Stuck((), how, list(events))
    return None


def how_stuck(seen: say.Seen | say.Stuck) -> str:
    """In words.

    >>> how_stuck(say.Stuck(worker=1, generation=1, kind="looping", phase="forward", waited_s=12.3,
    ...     limit_s=10.0))
    'looping, in forward for 12.3 s where it may take 10.0 s'
    """
    return f"{seen.kind}, {_where(seen)}"


def _where(seen: say.Seen | say.Stuck) -> str:
    limit = f" where it may take {seen.limit_s:.1f} s" if seen.limit_s is not None else ""
    return f"in {seen.phase} for {seen.waited_s:.1f} s{limit}"


def _stuck_event(state: State, rank: int, seen: say.Seen) -> log.WorkerStuck:
    worker = state.workers[seen.worker]
    return log.WorkerStuck(
        rank=rank,
        node=worker.node,
        pid=worker.pid,
        kind=seen.kind,
        phase=seen.phase,
        step=seen.step,
        waited_s=seen.waited_s,
        limit_s=seen.limit_s,
        stacks=seen.stacks,
    )


def note_own_time(state: State, rank: int, step: int, own_s: float | None) -> list[Straggler]:
    """Take a rank's own time of a step; who is named as slow now that all have come."""
    if own_s is None or not state.setup.peers or state.split is not None:
        return []
    times = state.own_times.setdefault(step, {})
    times[rank] = own_s
    if len(times) < len(state.slots):
        return []
    # What some ranks have not said of earlier steps will not come any more.
    state.own_times = {other: one for other, one in state.own_times.items() if other > step}
    if state.stragglers is None:
        state.stragglers = Stragglers(state.setup.peers)
    return state.stragglers.add([times[each] for each in range(len(state.slots))])


def is_worth_evicting(state: State, straggler: Straggler, step: int, step_s: float | None) -> bool:
    """Whether the job asks for it, a spare waits, and the gain is larger than the cost."""
    if not state.setup.evict_stragglers or step_s is None:
        return False
    spares = [worker for worker in state.workers.values() if worker.rank is None and worker.waits]
    return worth_evicting(
        straggler.factor,
        step_s=step_s,
        steps_left=state.setup.num_steps - step,
        eviction_s=EVICTION_S,
        num_spares=len(spares),
    )
