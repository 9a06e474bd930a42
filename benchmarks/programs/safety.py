"""Inside the ranks of `recovery_overhead.py`: one run whose safety is on and off in turn."""

import json
import math
import time

import torch

from paceline.runtime import Session
from paceline.runtime.data import load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer

WARM_UP = 20
"""Steps in which a spare is still starting, and the interval of fingerprints is chosen."""

SHORTEST = 10
"""Steps of a block at the least; a block has a whole number of fingerprint intervals."""


def train(session: Session) -> None:
    """Train in blocks of steps, every second one without fingerprints, snapshots and settling.

    Writes `blocks.json`: the fingerprints' interval, steps of a block, and each block's seconds,
    from the start of its first step to the start of the next block's, with whether safety was on.
    """
    spec, shape = session.job.spec, session.plan.decoder
    assert shape is not None
    text, _ = load_text(session.job)
    model = session.build(lambda: Decoder(shape, spec.data.seq_len))
    optimizer = make_optimizer(model, spec.train)
    switch: _Switch | None = None
    blocks: list[tuple[bool, float]] = []
    began = 0.0
    for step in session.steps(model, optimizer, tokens_per_sample=spec.data.seq_len):
        if step.number == WARM_UP:
            switch = _Switch(session)
        if switch is not None and (step.number - WARM_UP) % switch.length == 0:
            number = (step.number - WARM_UP) // switch.length
            now = time.perf_counter()
            if number:
                blocks.append((_is_on(number - 1), now - began))
            began = now
            switch.turn(on=_is_on(number))
        step.train(text.samples, text.num_samples)
        step.apply()
    if session.is_first and switch is not None:
        found = {"every": switch.every, "length": switch.length, "blocks": blocks}
        (session.run.path / "blocks.json").write_text(json.dumps(found))


def _is_on(block: int) -> bool:
    """On, off, off, on, on, off, off, ...: a machine that slows down meets both alike."""
    return (block + 1) // 2 % 2 == 0


class _Switch:
    """Turns what keeps the state safe off and on again, on every rank in the same step."""

    def __init__(self, session: Session) -> None:
        loop = session._loop
        assert loop is not None
        self._keeper = loop._safekeeping
        self._member = session.member
        self._settle = self._member.settle
        self._snapshots = self._keeper.snapshot_every
        self.every = self._keeper.guard.every
        self.length = self.every * math.ceil(SHORTEST / self.every)

    def turn(self, *, on: bool) -> None:
        """Fingerprints, snapshots and settling from the next step on, or none of them."""
        self._keeper.guard.every = self.every if on else 0
        self._keeper.snapshot_every = self._snapshots if on else 0
        self._member.settle = self._settle if on else _pass  # type: ignore[method-assign]


def _pass(device: torch.device) -> None:
    """Instead of settling."""
