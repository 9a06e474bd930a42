"""What a run repaired by itself, as facts: what was wrong, on which rank, and what was done."""

from collections.abc import Iterator, Sequence

from paceline.record.events import (
    AnyEvent,
    CorruptionFound,
    FaultInjected,
    Recovered,
    RunFinished,
    WorkerLost,
    WorkerStarted,
)
from paceline.units import counted, numbered

_MOST = 3
"""Repairs and recoveries that are described one by one."""

_KNOWN_BY = {
    "majority": "most replicas differ from it",
    "moved": "its bytes changed while nothing wrote them",
    "replay": "its numbers were farther from those that were computed again",
}
_HEALED = {
    "replica": "copied from a replica",
    "memory": "went back to the snapshot in memory",
    "checkpoint": "went back to the checkpoint",
    "initial": "began again from the initial state",
    "recomputed": "computed again",
}
_SOURCES = {
    "own": "every rank had its state",
    "replica": "its state came from a replica",
    "memory": "state from the snapshot in memory",
    "checkpoint": "state from the newest checkpoint",
    "initial": "began again from the initial state",
}


def healed_facts(events: Sequence[AnyEvent], drilled: set[tuple[int, int]]) -> dict[str, str]:
    """`repaired`, `recovered` and `to do`, each where there is something to name.

    Args:
        events: All of the run's.
        drilled: (rank, process) of every fault that a drill injected.
    """
    found = {"repaired": list(_repaired(events)), "recovered": list(_recovered(events, drilled))}
    facts = {name: _joined(each) for name, each in found.items() if each}
    ended = next((each for each in reversed(events) if isinstance(each, RunFinished)), None)
    if facts and (ended is None or ended.outcome != "failed"):
        facts["to do"] = _to_do(events, drilled)
    return facts


def _repaired(events: Sequence[AnyEvent]) -> Iterator[str]:
    for number, event in enumerate(events):
        if not isinstance(event, CorruptionFound):
            continue
        first, *others = event.tensors or ["a tensor"]
        tensors = f"{first} and {len(others)} more" if others else first
        drill = ", by the drill" if _is_drilled(event, events[:number]) else ""
        if event.ranks:
            known = _KNOWN_BY.get(event.verdict, event.verdict)
            wrong = f"was wrong on {numbered('rank', event.ranks)} ({known}{drill})"
        else:
            odd = numbered("rank", event.suspects)
            wrong = f"differed on {odd}, which is wrong is not known{drill}"
        repeats = event.step - event.goes_on_after
        again = f", {counted(repeats, 'step')} repeated" if repeats else ""
        healed = _HEALED.get(event.healed, event.healed)
        yield f"after step {event.step} {tensors} {wrong}: {healed}{again}"


def _recovered(events: Sequence[AnyEvent], drilled: set[tuple[int, int]]) -> Iterator[str]:
    lost: dict[int, WorkerLost] = {}
    for event in events:
        if isinstance(event, WorkerLost):
            lost[event.rank] = event
        elif isinstance(event, Recovered):
            loss = lost.pop(event.lost_rank, None)
            how = f" ({loss.how}{_by_drill(loss, drilled)})" if loss else ""
            source = _SOURCES.get(event.source, event.source)
            again = (
                f"{counted(event.steps_lost, 'step')} repeated"
                if event.steps_lost
                else "no step lost"
            )
            yield (
                f"rank {event.lost_rank} was lost after step {event.failed_after_step}{how}: "
                f"{source}, {again}"
            )


def _to_do(events: Sequence[AnyEvent], drilled: set[tuple[int, int]]) -> str:
    """What a person should look at: a machine that was wrong, or a loss without a cause."""
    wrong: dict[str, int] = {}
    is_unknown = False
    for number, event in enumerate(events):
        if isinstance(event, CorruptionFound) and not _is_drilled(event, events[:number]):
            is_unknown |= not event.ranks
            for rank in event.ranks:
                place = _place(rank, events[:number])
                wrong[place] = wrong.get(place, 0) + 1
    advice = [
        f"{place} was wrong {count} times: test its memory, or leave it out"
        for place, count in wrong.items()
        if count > 1
    ]
    if wrong and not advice:
        advice = [f"if {' or '.join(wrong)} is named again, test its memory"]
    if is_unknown and not wrong:
        advice = [
            "if it happens again, recovery.fingerprint_every=1 or three replicas name the rank"
        ]
    losses = [each for each in events if isinstance(each, WorkerLost)]
    advice += [
        f"rank {each.rank} was {each.how}: the kernel's log of node {each.node} may have "
        "the reason (paceline diagnose dmesg.txt)"
        for each in losses
        if "SIGKILL" in each.how and not _by_drill(each, drilled)
    ][:1]
    return "; ".join(["nothing for this run", *advice])


def _is_drilled(event: CorruptionFound, before: Sequence[AnyEvent]) -> bool:
    ranks = {*event.ranks, *event.suspects}
    return any(
        isinstance(each, FaultInjected) and each.fault.startswith("flip ") and each.rank in ranks
        for each in before
    )


def _by_drill(loss: WorkerLost, drilled: set[tuple[int, int]]) -> str:
    return ", by the drill" if (loss.rank, loss.pid) in drilled else ""


def _place(rank: int, before: Sequence[AnyEvent]) -> str:
    starts = [each.node for each in before if isinstance(each, WorkerStarted) and each.rank == rank]
    return f"rank {rank}" + (f" (node {starts[-1]})" if starts else "")


def _joined(found: Sequence[str]) -> str:
    more = [f"{len(found) - _MOST} more"] if len(found) > _MOST else []
    return "; ".join([*found[:_MOST], *more])
