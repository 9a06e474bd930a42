"""Inside the ranks of `step_time.py`: Paceline's step and its rivals', in turn."""

import json
import time
from collections.abc import Callable

import rivals
import torch.distributed as dist

from paceline.runtime import Session
from paceline.runtime.data import load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer


def train(session: Session) -> None:
    """Same model, same data, same optimizer; what differs is who drives the step.

    Writes `turns.json`: seconds of every step by name, and why a rival is not there.
    """
    spec, shape, layout = session.job.spec, session.plan.decoder, session.plan.layout
    assert shape is not None
    text, _ = load_text(session.job)
    model = session.build(lambda: Decoder(shape, spec.data.seq_len))
    optimizer = make_optimizer(model, spec.train)
    scene = rivals.Scene(
        layout,
        lambda: Decoder(shape, spec.data.seq_len),
        spec.train,
        lambda ids: text.samples([each % text.num_samples for each in ids]),
    )
    steps = session.steps(model, optimizer, tokens_per_sample=spec.data.seq_len)

    def our_step(number: int) -> None:
        step = next(steps)
        step.train(text.samples, text.num_samples)
        step.apply()

    runners: dict[str, Callable[[int], float | None]] = {"Paceline": our_step}
    missing = {}
    for name, make in rivals.RIVALS.items():
        try:
            runners[name] = make(scene)
        except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    turns = []
    names = list(runners)
    for number in range(1, spec.train.steps + 1):
        seconds, losses = {}, {}
        shift = number % len(names)  # nobody is always after the same one
        for name in names[shift:] + names[:shift]:
            dist.barrier()
            start = time.perf_counter()
            losses[name] = runners[name](number)
            seconds[name] = time.perf_counter() - start
        _check_equal([loss for name, loss in losses.items() if loss is not None])
        turns.append(seconds)
    next(steps, None)
    if session.is_first:
        found = {"turns": turns, "missing": missing}
        (session.run.path / "turns.json").write_text(json.dumps(found))


def _check_equal(losses: list[float]) -> None:
    """Rivals read the same samples from the same weights on."""
    apart = max(losses) - min(losses)
    if apart > _ROUNDING * max(losses):
        raise RuntimeError(f"the rivals' losses differ by {apart}: {losses}")


_ROUNDING = 1e-2
"""Relative difference of float32 losses that hundreds of AdamW steps make of rounding, at the most:
a guess. A library that computes something else is off by more in a few steps."""
