"""One decision in the making: the moment, what is to be done so far, and how workers are told.

Leaves out what is decided: see `core.py` for where that is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.control import messages as say
from paceline.control.state import Action, Clock, Record, Send, State
from paceline.record import events as log


@dataclass(slots=True)
class Decision:
    """One decision in the making: the moment, and the actions so far."""

    state: State
    clock: Clock
    actions: list[Action] = field(default_factory=list)
    """In the order in which they are to be done."""

    def record(self, event: log.AnyEvent) -> None:
        """Write an event into the run's record, as of now and of the generation there is now."""
        at, generation = self.clock.unix_s, self.state.generation
        stamped = msgspec.structs.replace(event, at=at, generation=generation)
        self.actions.append(Record(stamped))

    def promise_less(self, change: log.ExactnessChanged) -> None:
        """Another promise of the run's end from here on; recorded once, and never a better one."""
        if self.state.exactness not in (change.exactness, "different"):
            self.state.exactness = change.exactness
            self.record(change)

    def send(self, node: int, message: say.ToAgent) -> None:
        self.actions.append(Send(node, message))

    def send_all(self, nodes: Iterable[int], message: say.ToAgent) -> None:
        for node in sorted(nodes):
            self.send(node, message)


def tell(state: State, number: int | None, message: say.ToWorker, decision: Decision) -> None:
    """Have the agent of a worker hand it a message; nobody has the number None."""
    if number is not None:
        decision.send(state.workers[number].node, say.Tell(worker=number, message=message))


def tell_all(state: State, message: say.ToWorker, decision: Decision) -> None:
    """Have every worker that has a rank handed a message."""
    for slot in state.slots:
        tell(state, slot.worker, message, decision)
