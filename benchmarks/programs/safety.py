"""Inside the ranks of `recovery_overhead.py`: one run whose safety is on and off at random."""

import json
import random
import time

from paceline.runtime import Session
from paceline.runtime.data import load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer

WARM_UP = 40
"""Steps in which a spare is still starting, and the interval of fingerprints is chosen."""

BLOCK = 2
"""Steps of a block: its first has what is on, the second shows what that leaves behind (cold
caches, a snapshot that is hashed in a thread)."""


def train(session: Session) -> None:
    """Train in blocks of steps that each have a check and a snapshot or not, by chance.

    Writes `blocks.json`: the intervals of checks and of snapshots as the run would have them, and
    each block's seconds and what was on.
    """
    spec, shape = session.job.spec, session.plan.decoder
    assert shape is not None
    text, _ = load_text(session.job)
    model = session.build(lambda: Decoder(shape, spec.data.seq_len))
    optimizer = make_optimizer(model, spec.train)
    switch: _Switch | None = None
    blocks: list[tuple[float, dict[str, bool]]] = []
    began = 0.0
    for step in session.steps(model, optimizer, tokens_per_sample=spec.data.seq_len):
        if step.number == WARM_UP:
            switch = _Switch(session)
        if switch is not None:
            place = (step.number - WARM_UP) % BLOCK
            if place == 0:
                now = time.perf_counter()
                if step.number > WARM_UP:
                    blocks.append((now - began, switch.on))
                began = now
                switch.draw(step.number)
            switch.turn(is_first=place == 0)
        step.train(text.samples, text.num_samples)
        step.apply()
    if session.is_first and switch is not None:
        found = {"every": switch.every, "snapshots": switch.snapshots, "blocks": blocks}
        (session.run.path / "blocks.json").write_text(json.dumps(found))


class _Switch:
    """Turns what keeps the state safe on and off, on every rank in the same step."""

    def __init__(self, session: Session) -> None:
        loop = session._loop
        assert loop is not None
        self._keeper = loop._safekeeping
        self.every = self._keeper.guard.every
        self.snapshots = self._keeper.snapshot_every
        self.on: dict[str, bool] = {}

    def draw(self, number: int) -> None:
        """What is on in the block that begins with this step: the same on every rank."""
        draw = random.Random(number)
        self.on = {name: draw.random() < 0.5 for name in ("check", "snapshot")}

    def turn(self, *, is_first: bool) -> None:
        """One check and one snapshot in the block's first step."""
        self._keeper.guard.every = 1 if is_first and self.on["check"] else 0
        takes = is_first and self.on["snapshot"] and self.snapshots
        self._keeper.snapshot_every = 1 if takes else 0
