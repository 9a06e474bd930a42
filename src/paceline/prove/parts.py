"""What each storage was there for, judged by its life once the step is over.

What a driver knows is marked while tracing (parameters, optimizer state, gathered FSDP units); the
rest follows from when a storage was allocated and when it was freed.
"""

from paceline.prove.places import Place
from paceline.prove.trace import ALLOC, FREE, PLACE, Trace

_BEFORE = Place("before", 0, 0, "", None, False)


def classify(trace: Trace) -> None:
    """Fill in `trace.parts` wherever it is empty."""
    born: dict[int, Place] = {}
    died: dict[int, Place] = {}
    place = _BEFORE
    for index, (kind, storage, _) in enumerate(trace.events):
        if kind == PLACE:
            place = trace.places[storage] if index >= trace.start else _BEFORE
        elif kind == ALLOC:
            born[storage] = place if index >= trace.start else _BEFORE
            died.pop(storage, None)
        elif kind == FREE:
            died[storage] = place
    for storage, birth in born.items():
        if not trace.parts[storage]:
            trace.parts[storage] = _part_of(birth, died.get(storage))


def leave_out_host(trace: Trace) -> None:
    """Count no bytes of the host."""
    for index, (kind, which, _) in enumerate(trace.events):
        if kind in (ALLOC, FREE) and which in trace.host:
            trace.events[index] = (kind, which, 0)


def _part_of(birth: Place, death: Place | None) -> str:
    if birth is _BEFORE:
        return "buffers" if death is None else "temporaries"
    same_pass = death is not None and (birth.phase, birth.micro_batch) == (
        death.phase,
        death.micro_batch,
    )
    if birth.phase == "loss":
        return "logits and loss"
    if birth.phase == "forward":
        return "temporaries" if same_pass else "activations"
    if birth.phase == "backward":
        if birth.again:
            ends_soon = same_pass and death is not None and death.again
            return "temporaries" if ends_soon else "recomputed"
        if not same_pass:
            return "gradients"
        return "temporaries" if birth.module else "logits and loss"
    return "temporaries"
