"""What workers say, and where each word of it goes.

What only tells of something is written into the record here.
"""

from typing import assert_never

from paceline.control import messages as say
from paceline.control.decision import Decision, tell
from paceline.control.drilling import fault_due, fault_of_spare
from paceline.control.ending import give_up, stop_wanted
from paceline.control.forming import go_on, join_if_all_wait
from paceline.control.interrupting import heard
from paceline.control.progress import complete, rank_restored, step_done
from paceline.control.rank_assignment import is_true_of_all
from paceline.control.resizing import leave_wanted
from paceline.control.stalls import note_loss, note_speed
from paceline.control.state import State
from paceline.control.worker_loss import (
    gpu_fails,
    peer_lost,
    went_back,
    worker_crashed,
    worker_parked,
)
from paceline.record import events as log
from paceline.units import counted


def worker_said(state: State, event: say.Said, decision: Decision) -> None:
    """A worker's own words. Those of an older generation change nothing."""
    number, message = event.worker, event.message
    worker = state.workers[number]
    match message:
        case say.Ready(host=host, port=port):
            if worker.store is None and not worker.is_fenced:
                worker.store, worker.waits = (host, port), True
                if worker.rank is None:
                    go_on(state, decision)
                else:
                    join_if_all_wait(state, decision)
                fault_of_spare(state, worker, decision)
        case say.Parked():
            if event.generation == worker.generation:
                worker_parked(state, number, message, decision)
        case say.Heard(generation=generation):
            heard(state, number, generation, decision)
        case say.PeerLost(reason=reason):
            if event.generation == worker.generation:
                peer_lost(state, number, reason, decision)
        case say.Crashed():
            if event.generation == worker.generation:
                worker_crashed(state, number, message, decision)
        case say.LeaveWanted(with_node=with_node):
            leave_wanted(state, number, decision, with_node=with_node)
        case _:
            rank, is_at_work = worker.rank, state.phase in ("joining", "training")
            if rank is not None and is_at_work and event.generation == state.generation:
                _news(state, rank, message, decision)


def to_record(state: State, event: log.Reported, decision: Decision) -> None:
    """Something for the record; what has consequences is a GPU that fails, a way back, and an alert
    that the job wants something done about."""
    decision.record(event)
    match event:
        case log.GpuHealth(is_fatal=True):
            gpu_fails(state, event.node, decision)
        case log.CorruptionFound() if event.goes_on_after < event.step:
            went_back(state, event, decision)
        case log.AlertFired(on_alert="stop") if not state.stops:
            stop_wanted(state, f"alert {event.rule}", decision)
        case log.AlertFired(on_alert="checkpoint") if state.slots:
            # One rank is enough: its vote reaches the others, all at the same step.
            tell(state, state.slots[0].worker, say.SaveAtBoundary(), decision)


def _news(state: State, rank: int, message: say.FromWorker, decision: Decision) -> None:
    """From a rank of the generation at work."""
    slot = state.slots[rank]
    match message:
        case say.Met(world_size=world_size):
            slot.met = message
            if world_size != len(state.slots):
                how = f"met a world of {counted(world_size, 'rank')}, asked for {len(state.slots)}"
                give_up(state, "failed", f"rank {rank}: {how}", decision)
            elif is_true_of_all(state, "met", lambda slot: slot.met is not None):
                state.form_deadline_s = None
                if state.failure is not None:
                    state.failure.met_at = decision.clock.monotonic_s
        case say.Restored():
            rank_restored(state, rank, message, decision)
        case say.StepDone(step=step, own_s=own_s, own_loss=own_loss):
            step_done(state, slot, step, decision)
            note_loss(state, rank, step, own_loss, decision)
            note_speed(state, rank, step, own_s, decision)
        case say.ForRecord(event=event):
            to_record(state, event, decision)
        case say.FaultDue(fault=fault):
            fault_due(state, rank, fault, decision)
        case say.Completed():
            slot.completed = message
            if is_true_of_all(state, "completed", lambda slot: slot.completed is not None):
                complete(state, decision)
        case (
            say.Ready()
            | say.Heard()
            | say.Collectives()
            | say.PeerLost()
            | say.Parked()
            | say.Crashed()
            | say.LeaveWanted()
        ):
            pass  # not about a generation: `worker_said` has them
        case _:
            assert_never(message)
