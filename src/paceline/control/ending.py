"""The run ends: because it is asked to, or for good or bad reason.

Leaves out whether a run that has no more steps to do is finished (`progress.py`).
"""

from paceline.control import messages as say
from paceline.control.decision import Decision, tell_all
from paceline.control.state import KillAgent, Outcome, State
from paceline.record import events as log


def stop_wanted(state: State, by: str, decision: Decision) -> None:
    """The run shall end: at a step boundary, or at once when it is asked for again."""
    decision.record(log.StopAsked(by=by))
    state.stop_by = by
    state.stops += 1
    first = state.generation == state.setup.first_generation
    if state.phase == "gathering" or (first and state.phase == "forming"):
        give_up(state, "interrupted", f"stopped by {by} before training", decision)
    elif state.stops > 1:
        end_all_agents(state, decision)
        give_up(state, "interrupted", f"asked to stop at once by {by}", decision)
    else:
        tell_all(state, say.StopAtBoundary(), decision)
        state.stop_deadline_s = decision.clock.monotonic_s + state.setup.grace_s


def give_up(state: State, outcome: Outcome, reason: str | None, decision: Decision) -> None:
    """The run is over, well or not."""
    known = [slot.completed for slot in state.slots if slot.completed is not None]
    first = known[0] if known else None
    everyone = known if len(known) == len(state.slots) else []
    decision.record(
        log.RunFinished(
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
        decision.send_all(state.agents, say.KillWorkers())
    decision.send_all(state.agents, say.Leave())
    state.phase, state.outcome, state.reason = "over", outcome, reason


def end_all_agents(state: State, decision: Decision) -> None:
    """Ask nobody any more: end the agents, and the kernel ends their workers."""
    nodes = {worker.node for worker in state.workers.values()}
    decision.actions.extend(KillAgent(node) for node in sorted(nodes))
