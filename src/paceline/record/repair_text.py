"""What a run repaired by itself, in words: numbers that were wrong, and a rank that was lost."""

from paceline.record.events import CorruptionFound, Recovered
from paceline.units import counted, numbered

_KNOWN_BY = {
    "majority": "most replicas differ from it",
    "moved": "its bytes changed while nothing wrote them",
    "replay": "its numbers were farther from those that were computed again",
}
_SOURCES = {
    "own": "the ranks themselves",
    "replica": "a replica",
    "memory": "memory",
    "checkpoint": "a checkpoint",
    "initial": "the seed",
}
_REPAIRED = {
    "memory": "repaired from the newest step in memory",
    "initial": "training begins again",
    "recomputed": "computed again",
}


def corruption_text(event: CorruptionFound, also: str = "") -> str:
    """Which tensors were wrong on which ranks, how that is known, and what was done.

    Args:
        also: What else is known of it, behind how it is known.
    """
    first, *others = event.tensors or ["a tensor"]
    tensors = f"{first} and {len(others)} more" if others else first
    odd = event.ranks or event.suspects
    on = f" on {numbered('rank', odd)}" if odd else ""
    does = f"{'are' if others else 'is'} wrong{on} ({_KNOWN_BY.get(event.verdict, event.verdict)}"
    if not event.ranks:
        differs = "differ" if others else "differs"
        does = f"{differs}{on or ' between ranks'}, and which is right is not known"
        also = f" ({also.removeprefix(', ')}" if also else ""
    end = ")" if also or event.ranks else ""
    source = f"repaired from {_SOURCES.get(event.healed, event.healed)}"
    repeats = event.step - event.goes_on_after
    again = f", {counted(repeats, 'step')} repeated" if repeats else ""
    healed = _REPAIRED.get(event.healed, source)
    return f"after step {event.step} {tensors} {does}{also}{end}; {healed}{again}"


def recovery_text(event: Recovered) -> str:
    """What a recovery cost: the steps that are repeated, or where the state came from."""
    if event.steps_lost:
        steps = counted(event.steps_lost, "finished step")
        return f"{steps} repeated from step {event.resumed_from_step}"
    return f"no finished step lost, state from {_SOURCES.get(event.source, event.source)}"
