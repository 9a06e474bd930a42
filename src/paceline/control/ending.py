"""The run ends: because it is asked to, or for good or bad reason.

Leaves out whether a run that has no more steps to do is finished (`progress.py`).
"""

from paceline.control import messages as say
from paceline.control.state import KillAgent, Outcome, State
from paceline.control.turn import Turn, tell_all
from paceline.record import events as log


def stop_wanted(state: State, by: str, turn: Turn) -> None:
    """The run shall end: at a step boundary, or at once when it is asked for again."""
    turn.record(log.StopAsked(at=turn.clock.unix_s, generation=state.generation, by=by))
    state.stop_by = by
    state.stops += 1
    first = state.generation == state.setup.first_generation
    if state.phase == "gathering" or (first and state.phase == "forming"):
        give_up(state, "interrupted", f"stopped by {by} before training", turn)
    elif state.stops > 1:
        end_all_agents(state, turn)
        give_up(state, "interrupted", f"asked to stop at once by {by}", turn)
    else:
        tell_all(state, say.StopAtBoundary(), turn)
        state.stop_deadline_s = turn.clock.monotonic_s + state.setup.grace_s


def give_up(state: State, outcome: Outcome, reason: str | None, turn: Turn) -> None:
    """The run is over, well or not."""
    known = [slot.completed for slot in state.slots if slot.completed is not None]
    first = known[0] if known else None
    everyone = known if len(known) == len(state.slots) else []
    turn.record(
        log.RunFinished(
            at=turn.clock.unix_s,
            generation=state.generation,
            outcome=outcome,
            step=first.step if first is not None else state.furthest_step,
            saved_step=first.saved_step if first is not None else None,
            state_digest=first.state_digest if first is not None else None,
            held_out_loss=first.held_out_loss if first is not None else None,
            restarts=state.restarts,
            reason=reason,
            exactness=state.exactness,
            baseline_bytes=[record.baseline_bytes for record in everyone],
            peak_bytes=[record.peak_bytes for record in everyone],
        )
    )
    if not everyone:
        turn.send_all(state.agents, say.KillWorkers())
    turn.send_all(state.agents, say.Leave())
    state.phase, state.outcome, state.reason = "over", outcome, reason


def end_all_agents(state: State, turn: Turn) -> None:
    """Ask nobody any more: end the agents, and the kernel ends their workers."""
    nodes = {worker.node for worker in state.workers.values()}
    turn.actions.extend(KillAgent(node) for node in sorted(nodes))
