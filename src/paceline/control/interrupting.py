"""A generation is left in two moves: every rank learns that it is over, then all leave its groups.

An abort at one rank can complete a collective at another, with garbage: NCCL's kernels that are
told to leave post their steps to their neighbours without data (NVIDIA/nccl 2.30,
`src/device/prims_simple.h`, `prims_ll.h`). So `Interrupt` only sets a flag, which each rank checks
before it acts on anything that came over a group. `Abort` follows when every rank has answered, or
has surely ended: one that is told to die has exited, and one on a machine that nobody reaches has
come to the end of its lease. Until then it could be in the middle of a collective, which the abort
would complete. A process that was killed has exited before anybody is interrupted, and the rank of
an unreachable one is nobody's for as long, so neither makes a recovery longer.

Over gloo an abort raises at the other ranks and completes nothing, so a worker there leaves at the
first word (`Channel.leaves_at_once`). With the second one recovery took 35 ms longer on 4 ranks of
2 cores, and ranks that went on into another message took seconds to come free (measured:
`benchmarks/recovery.py`).
"""

from paceline.control import messages as say
from paceline.control.decision import Decision, tell
from paceline.control.state import State

_STEPS_TO_PARK = 3.0
"""Steps that an interrupted worker may take to leave its groups: it hears of it in its next
collective, at most a step away. Some never come free: gloo forgets an operation in the middle of a
message (`runtime/strategy/data/gloo_all_reduce.py`), and only DDP's can be broken off."""

_LEAST_PARK_S = 3.0
"""Parking itself takes milliseconds, but for a worker that looks for the store of a rank that has
died: torch lets go of that after up to 2.5 s (`runtime/recovery/groups.py`, measured)."""


def interrupt(state: State, decision: Decision) -> None:
    """Tell every rank of the generation before this one, which is forming, that it is over.

    Once for each generation. Ranks that have left it by themselves, as agreed, are not told.
    """
    generation = state.generation - 1
    if state.interrupted >= generation:
        return
    state.interrupted = generation
    members = _members(state, generation)
    if not members:
        return
    state.unheard = set(members)
    for number in members:
        tell(state, number, say.Interrupt(generation=generation), decision)
    state.form_deadline_s = decision.clock.monotonic_s + park_s(state)


def abort_when_all_heard(state: State, decision: Decision) -> None:
    """Let all leave their groups, once every one has answered the interruption or has ended."""
    if state.unheard is None or state.unheard or _may_live(state):
        return
    state.unheard = None
    for number in _members(state, state.interrupted):
        tell(state, number, say.Abort(generation=state.interrupted), decision)
    state.form_deadline_s = decision.clock.monotonic_s + park_s(state)


def heard(state: State, number: int, generation: int, decision: Decision) -> None:
    """A worker has answered, or cannot be waited for any more. Late answers change nothing."""
    if generation == state.interrupted and state.unheard:
        state.unheard.discard(number)
        abort_when_all_heard(state, decision)


def _may_live(state: State) -> bool:
    """Whether a rank of that generation that will not answer may still be in its groups."""
    return bool(state.in_doubt_s) or any(
        worker.is_fenced and worker.generation == state.interrupted
        for worker in state.workers.values()
    )


def park_s(state: State) -> float:
    """How long interrupted workers have to answer, and again to leave; by what a step takes, once
    that is known."""
    if state.step_s is None:
        return state.setup.park_timeout_s
    return max(min(_LEAST_PARK_S, state.setup.park_timeout_s), _STEPS_TO_PARK * state.step_s)


def _members(state: State, generation: int) -> list[int]:
    """Workers that may still be in the groups of that generation."""
    return [
        number
        for number, worker in state.workers.items()
        if worker.generation == generation and not worker.waits and not worker.is_fenced
    ]
