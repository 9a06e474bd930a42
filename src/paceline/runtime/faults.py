"""A drill's faults inside a worker: stand still at the named moment and be killed there."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.control import messages as say
from paceline.runtime.channel import Channel


@dataclass(frozen=True, slots=True)
class _Kill:
    text: str
    rank: int
    step: int
    phase: str


class Faults:
    """The faults of this rank that have not fired yet.

    At the named moment the worker asks its agent for the fault and waits for it, so that the
    kill is a real SIGKILL from outside, at a place that is the same every time.
    """

    def __init__(self, faults: Sequence[str] = (), *, rank: int, channel: Channel) -> None:
        self._due = [kill for kill in map(_parse, faults) if kill.rank == rank]
        self._channel = channel

    def pass_by(self, phase: str, step: int) -> None:
        """Nothing, unless a fault is due at this phase of this step."""
        for kill in self._due:
            if kill.step == step and kill.phase == phase:
                self._channel.send(say.FaultDue(fault=kill.text))
                while True:  # until the agent's SIGKILL
                    time.sleep(1)


def _parse(text: str) -> _Kill:
    match = re.fullmatch(r"rank=(\d+)@step=(\d+)(?:@(\w+))?", text)
    assert match is not None, "the job's faults are checked when it is read"
    rank, step, phase = match.groups()
    return _Kill(text, int(rank), int(step), phase or "backward")
