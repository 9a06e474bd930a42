"""What workers say, and where each word of it goes.

What only tells of something is written into the record here.
"""

from typing import assert_never

from paceline.control import messages as say
from paceline.control.drilling import fault_due, fault_of_spare
from paceline.control.ending import give_up
from paceline.control.forming import go_on, join_if_all_wait
from paceline.control.interrupting import heard
from paceline.control.laggards import note_speed
from paceline.control.losing import peer_lost, worker_crashed, worker_parked
from paceline.control.progress import complete, rank_restored, step_done
from paceline.control.resizing import leave_wanted
from paceline.control.seats import is_true_of_all
from paceline.control.state import State
from paceline.control.turn import Turn
from paceline.record import events as log


def worker_said(state: State, event: say.Said, turn: Turn) -> None:
    """A worker's own words. Those of an older generation change nothing."""
    number, message = event.worker, event.message
    worker = state.workers[number]
    match message:
        case say.Ready(host=host, port=port):
            if worker.store is None and not worker.is_fenced:
                worker.store, worker.waits = (host, port), True
                if worker.rank is None:
                    go_on(state, turn)
                else:
                    join_if_all_wait(state, turn)
                fault_of_spare(state, worker, turn)
        case say.Parked():
            if event.generation == worker.generation:
                worker_parked(state, number, message, turn)
        case say.Heard(generation=generation):
            heard(state, number, generation, turn)
        case say.PeerLost(reason=reason):
            if event.generation == worker.generation:
                peer_lost(state, number, reason, turn)
        case say.Crashed():
            if event.generation == worker.generation:
                worker_crashed(state, number, message, turn)
        case say.LeaveWanted(with_node=with_node):
            leave_wanted(state, number, turn, with_node=with_node)
        case _:
            rank, is_at_work = worker.rank, state.phase in ("joining", "training")
            if rank is not None and is_at_work and event.generation == state.generation:
                _news(state, rank, message, turn)


def _news(state: State, rank: int, message: say.FromWorker, turn: Turn) -> None:
    """From a rank of the generation at work."""
    at, generation, slot = turn.clock.unix_s, state.generation, state.slots[rank]
    match message:
        case say.Met(world_size=world_size):
            slot.met = message
            if world_size != len(state.slots):
                how = f"met a world of {world_size} ranks, asked for {len(state.slots)}"
                give_up(state, "failed", f"rank {rank}: {how}", turn)
            elif is_true_of_all(state, "met", lambda slot: slot.met is not None):
                state.form_deadline_s = None
                if state.failure is not None:
                    state.failure.met_at = turn.clock.monotonic_s
        case say.Restored():
            rank_restored(state, rank, message, turn)
        case say.StepDone(step=step, own_s=own_s):
            step_done(state, slot, step, turn)
            note_speed(state, rank, step, own_s, turn)
        case say.EvaluationDone(step=step, loss=loss, seconds=seconds):
            turn.record(
                log.Evaluated(at=at, generation=generation, step=step, loss=loss, seconds=seconds)
            )
        case say.BaselineDone(name=name, loss=loss):
            turn.record(log.BaselineEvaluated(at=at, generation=generation, name=name, loss=loss))
        case say.NoteMade(text=text):
            turn.record(log.Noted(at=at, generation=generation, text=text))
        case say.SaveDone():
            turn.record(
                log.CheckpointSaved(
                    at=at,
                    generation=generation,
                    step=message.step,
                    checkpoint=message.checkpoint,
                    num_bytes=message.num_bytes,
                    stall_s=message.stall_s,
                    write_s=message.write_s,
                )
            )
        case say.SaveError(step=step, reason=reason):
            turn.record(
                log.CheckpointFailed(at=at, generation=generation, step=step, reason=reason)
            )
        case say.CopyDone():
            turn.record(
                log.CheckpointCopied(
                    at=at,
                    generation=generation,
                    step=message.step,
                    url=message.url,
                    num_bytes=message.num_bytes,
                    stored_bytes=message.stored_bytes,
                    seconds=message.seconds,
                    checked=message.checked,
                    note=message.note,
                )
            )
        case say.CopyError(step=step, reason=reason):
            turn.record(
                log.CheckpointCopyFailed(at=at, generation=generation, step=step, reason=reason)
            )
        case say.StepVotedDown(step=step, reason=reason):
            turn.record(log.StepRefused(at=at, generation=generation, step=step, reason=reason))
        case say.CorruptionSeen():
            turn.record(
                log.CorruptionFound(
                    at=at,
                    generation=generation,
                    step=message.step,
                    ranks=message.ranks,
                    suspects=message.suspects,
                    tensors=message.tensors,
                    verdict=message.verdict,
                    healed=message.healed,
                    goes_on_after=message.goes_on_after,
                )
            )
        case say.FaultDue(fault=fault):
            fault_due(state, rank, fault, turn)
        case say.Completed():
            slot.completed = message
            if is_true_of_all(state, "completed", lambda slot: slot.completed is not None):
                complete(state, turn)
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
