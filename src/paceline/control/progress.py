"""How far a generation at work is: its state is back, its steps are done, its ranks are through.

Leaves out what its workers say of other things (`worker_messages.py`).
"""

from paceline.control import messages as say
from paceline.control.decision import Decision, tell_all
from paceline.control.ending import give_up
from paceline.control.rank_assignment import is_true_of_all
from paceline.control.start_workers import keep_spares
from paceline.control.state import Clock, Failure, Slot, State
from paceline.record import events as log
from paceline.units import counted

_WORST_LAST: tuple[say.Source, ...] = (
    "own",
    "replica",
    "memory",
    "checkpoint",
    "initial",
)
"""Where a state may come from, from the least that is lost to the most."""

_ERRORS_LOST = log.ExactnessChanged(
    exactness="different",
    reason="train.gradient_compression powersgd: the errors that steps carry over were lost with "
    "the ranks' processes",
    tolerance=None,
)


def rank_restored(state: State, rank: int, message: say.Restored, decision: Decision) -> None:
    """A rank has its state back. With the last one, training starts."""
    if state.slots[rank].restored is not None:
        return
    slot = state.slots[rank]
    slot.restored = message
    if slot.worker is not None:
        state.workers[slot.worker].holds = True
    if rank == 0:
        for checkpoint, reason in message.refused:
            decision.record(log.CheckpointRefused(checkpoint=checkpoint, reason=reason))
    if not is_true_of_all(state, "restored", lambda slot: slot.restored is not None):
        return
    met = state.slots[0].met
    decision.record(
        log.TrainingStarted(
            first_step=message.first_step,
            checkpoint=message.checkpoint,
            source=_worst_source(state),
            pids=[
                state.workers[each.worker].pid or 0
                for each in state.slots
                if each.worker in state.workers
            ],
            backend=met.backend if met is not None else "unknown",
            world_size=len(state.slots),
        )
    )
    if state.setup.errors_from is not None and message.first_step > state.setup.errors_from + 1:
        decision.promise_less(_ERRORS_LOST)
    state.furthest_step = max(state.furthest_step, message.first_step - 1)
    if state.failure is not None:
        state.failure.restored_at = decision.clock.monotonic_s
    if state.stop_by is not None:
        tell_all(state, say.StopAtBoundary(), decision)


def step_done(state: State, slot: Slot, step: int, decision: Decision) -> None:
    """Every rank's news of a step passes here; what counts is when the last one is through."""
    if step <= slot.last_step:
        return
    slot.last_step = step
    state.num_at_step[step] = state.num_at_step.get(step, 0) + 1
    if state.num_at_step[step] < len(state.slots):
        return
    state.num_at_step = {other: n for other, n in state.num_at_step.items() if other > step}
    state.furthest_step = max(state.furthest_step, step)
    before, state.step_done_s = state.step_done_s, decision.clock.monotonic_s
    state.step_s = state.step_done_s - before if before is not None else None
    if state.phase == "joining":
        state.phase = "training"
        if state.failure is not None:
            decision.record(_recovered(state, state.failure, decision.clock))
            state.failure = None
        keep_spares(state, decision)


def complete(state: State, decision: Decision) -> None:
    """Every rank has a completion record: do they agree, and on what was asked for?"""
    records = [slot.completed for slot in state.slots if slot.completed is not None]
    worlds = sorted({record.world_size for record in records})
    if worlds != [len(state.slots)]:
        reason = f"asked for {counted(len(state.slots), 'rank')}, the workers saw {worlds}"
        give_up(state, "failed", reason, decision)
    elif len({record.state_digest for record in records}) > 1:
        give_up(state, "failed", "the ranks ended with different parameters", decision)
    elif len({(record.outcome, record.step) for record in records}) > 1:
        give_up(state, "failed", "the ranks ended at different steps", decision)
    else:
        if state.failure is not None:  # it came after the last step, so no step ended the recovery
            decision.record(_recovered(state, state.failure, decision.clock))
            state.failure = None
        if records[0].outcome == "finished":
            give_up(state, "finished", None, decision)
        else:
            by = state.stop_by or "a signal to a worker"
            give_up(state, "interrupted", f"stopped by {by}", decision)


def _worst_source(state: State) -> say.Source:
    sources = [slot.restored.source for slot in state.slots if slot.restored is not None]
    return max(sources, key=_WORST_LAST.index, default="initial")


def _recovered(state: State, failure: Failure, clock: Clock) -> log.Recovered:
    restored = [slot.restored for slot in state.slots if slot.restored is not None]
    resumed_from = restored[0].first_step - 1 if restored else 0
    sources = {each.source for each in restored}
    formed = failure.formed_at or failure.known_at
    met = failure.met_at or formed
    back = failure.restored_at or met
    began = failure.happened_at if failure.happened_at is not None else failure.known_at
    return log.Recovered(
        lost_rank=failure.rank,
        failed_after_step=failure.after_step,
        resumed_from_step=resumed_from,
        steps_lost=max(0, failure.after_step - resumed_from),
        source=_worst_source(state),
        in_place="own" in sources,
        detect_s=None if failure.happened_at is None else failure.known_at - failure.happened_at,
        fence_s=formed - failure.known_at,
        start_s=met - formed,
        restore_s=back - met,
        first_step_s=clock.monotonic_s - back,
        downtime_s=clock.monotonic_s - began,
    )
