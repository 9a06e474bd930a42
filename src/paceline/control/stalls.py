"""Ranks that stand still or are slow: all agents are asked, and who is to blame is ended.

An agent says that one of its workers is late. Who the others wait for only shows when all are
looked at together, so every agent is asked; once all have answered, or long enough after, one
verdict is given (`blame.py`), and whoever is to be ended goes the way of any lost worker.
"""

from typing import TypeVar

import msgspec

from paceline.control import messages as say
from paceline.control.blame import Fence, NobodyBehind, blame
from paceline.control.decision import Decision
from paceline.control.state import Clock, Inquiry, State
from paceline.control.stragglers import LossOutliers, Straggler, Stragglers, worth_evicting
from paceline.control.worker_loss import handle_loss
from paceline.record import events as log

_T = TypeVar("_T")

ANSWER_S = 1.0
"""How long agents may take to answer. Three times the most that tracebacks may take."""

EVICTION_S = 10.0
"""What replacing a rank is reckoned to cost, in seconds. A guess, on the safe side: with a warm
spare it takes about one."""


def worker_stuck(state: State, seen: say.Seen, decision: Decision) -> None:
    """A worker is late. Among ranks at work it may only be waiting for another one."""
    number, worker = seen.worker, state.workers[seen.worker]
    if worker.is_fenced or seen.generation != worker.generation:
        return
    if worker.rank is None:
        worker.is_fenced = True
        decision.send(worker.node, say.KillWorker(worker=number))
    elif state.phase in ("joining", "training") and worker.generation == state.generation:
        _ask_all(state, decision)
    elif state.phase == "forming" and not worker.generation:
        handle_loss(state, [number], how_stuck(seen), decision, cause="hang")


def worker_seen(state: State, seen: say.Seen, decision: Decision) -> None:
    """What one agent sees of a worker that all agents were asked about."""
    worker = state.workers[seen.worker]
    if state.inquiry is not None and worker.rank is not None and not worker.is_fenced:
        if worker.generation == state.generation:
            if seen.generation < worker.generation:
                # It was told to join and has not, while others have stood still waiting for it.
                seen = msgspec.structs.replace(seen, is_late=True)
            state.inquiry.seen[worker.rank] = seen
        judge_when_answered(state, decision)


def judge_when_answered(state: State, decision: Decision) -> None:
    """End whoever the others wait for, once all agents or enough time have told."""
    if state.phase not in ("joining", "training"):
        state.inquiry = None
    inquiry = state.inquiry
    if inquiry is None:
        return
    if len(inquiry.seen) < len(state.slots) and not _is_over(inquiry, decision.clock):
        return
    state.inquiry, seen = None, inquiry.seen
    match blame(seen, num_ranks=len(state.slots), in_order=state.setup.in_order):
        case Fence(ranks):
            for rank in ranks:
                decision.record(_stuck_event(state, rank, seen[rank]))
            slots = [state.slots[rank].worker for rank in ranks]
            lost = [number for number in slots if number is not None]
            handle_loss(state, lost, how_stuck(seen[ranks[0]]), decision, cause="hang")
        case NobodyBehind():  # all leave, and meet again
            for rank, one in sorted(seen.items()):
                decision.record(_stuck_event(state, rank, one))
            longest = max(seen.values(), key=lambda one: one.waited_s)
            how = f"every rank waits for the others, {_where(longest)}"
            handle_loss(state, [seen[0].worker], how, decision, cause="network", ends=False)


def how_stuck(seen: say.Seen) -> str:
    """In words: `looping, in forward for 12.3 s where it may take 10.0 s`."""
    return f"{seen.kind}, {_where(seen)}"


def note_speed(state: State, rank: int, step: int, own_s: float | None, decision: Decision) -> None:
    """Take a rank's own time of a step, and end one that is slow when that pays."""
    if state.phase != "training":
        return
    for one in _note_own_time(state, rank, step, own_s):
        number = state.slots[one.rank].worker
        if number is None:
            continue
        evicts = _is_worth_evicting(state, one, step)
        decision.record(
            log.StragglerNamed(
                rank=one.rank,
                node=state.workers[number].node,
                factor=one.factor,
                step=step,
                num_steps=one.num_steps,
                evicted=evicts,
            )
        )
        if evicts:
            how = f"{one.factor:.2f} times as slow as its peers"
            handle_loss(state, [number], how, decision, cause="slow")
            return


def note_loss(state: State, rank: int, step: int, loss: float | None, decision: Decision) -> None:
    """Take a rank's own loss of a step, and name ranks whose losses stay off their peers'."""
    if state.phase != "training" or not state.setup.peers or state.split is not None:
        return
    if not (losses := _of_all(state, state.own_losses, rank, step, loss)):
        return
    if all(each is None for each in losses):
        return
    if state.loss_outliers is None:
        state.loss_outliers = LossOutliers(state.setup.peers, losses)
    for one in state.loss_outliers.add(losses):
        number = state.slots[one.rank].worker
        if number is not None:
            decision.record(
                log.LossOutlierNamed(
                    rank=one.rank,
                    node=state.workers[number].node,
                    factor=one.factor,
                    step=step,
                    num_steps=one.num_steps,
                )
            )


def _of_all(
    state: State, by_step: dict[int, dict[int, _T]], rank: int, step: int, value: _T
) -> list[_T]:
    """What all ranks reported of a step, in rank order, once the last one has; else nothing."""
    of_step = by_step.setdefault(step, {})
    of_step[rank] = value
    if len(of_step) < len(state.slots):
        return []
    # What some ranks have not said of earlier steps will not come any more.
    for other in [other for other in by_step if other <= step]:
        del by_step[other]
    return [of_step[each] for each in range(len(state.slots))]


def _ask_all(state: State, decision: Decision) -> None:
    """Have all agents look, unless they were asked a moment ago."""
    if state.inquiry is None or _is_over(state.inquiry, decision.clock):
        state.inquiry = Inquiry(asked_s=decision.clock.monotonic_s)
        decision.send_all(state.agents, say.Look())


def _is_over(inquiry: Inquiry, clock: Clock) -> bool:
    return clock.monotonic_s - inquiry.asked_s >= ANSWER_S


def _where(seen: say.Seen) -> str:
    limit = f" where it may take {seen.limit_s:.1f} s" if seen.limit_s is not None else ""
    return f"in {seen.phase.words} for {seen.waited_s:.1f} s{limit}"


def _stuck_event(state: State, rank: int, seen: say.Seen) -> log.WorkerStuck:
    worker = state.workers[seen.worker]
    return log.WorkerStuck(
        rank=rank,
        node=worker.node,
        pid=worker.pid,
        kind=seen.kind,
        phase=seen.phase.words,
        step=seen.step,
        waited_s=seen.waited_s,
        limit_s=seen.limit_s,
        stacks=seen.stacks,
    )


def _note_own_time(state: State, rank: int, step: int, own_s: float | None) -> list[Straggler]:
    """Take a rank's own time of a step; who is named as slow now that all have come."""
    if own_s is None or not state.setup.peers or state.split is not None:
        return []
    if not (times := _of_all(state, state.own_times, rank, step, own_s)):
        return []
    if state.stragglers is None:
        state.stragglers = Stragglers(state.setup.peers)
    return state.stragglers.add(times)


def _is_worth_evicting(state: State, straggler: Straggler, step: int) -> bool:
    """Whether the job asks for it, a spare waits, and the gain is larger than the cost."""
    step_s = state.step_s
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
