"""What keeping shadows costs while nothing fails.

    .venv/bin/python benchmarks/shadow_overhead.py [--small 40] [--large 12] [--ranks 2]

Steps of FSDP2 with AdamW in float32 over gloo, on real ranks, every second one with its gradients
sent and the shadow moved on, in turn first and second of a pair: both kinds see the same machine.
On a CPU the shadow's work shares the cores and the memory with the steps, so nothing is hidden.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from figures import interval, machine, ratio_of_medians, spread
from tests.ranks import run_ranks
from tests.run.scene import Scene
from tests.runtime.test_session import session_in

from paceline.runtime.data import load_text
from paceline.runtime.models import make_model
from paceline.runtime.optimizer import make_optimizer

SHAPES = {"small": (2, 128), "large": (5, 512)}
"""Layers and hidden size: 0.5 M and 16 M parameters."""

WARM_UP = 4


def is_on(number: int) -> bool:
    """Whether a step is one with shadows: in every pair one is, in turn the first and the last."""
    pair, place = divmod(number, 2)
    return place == pair % 2


def steps(rank: int, world: int, folder: Path, size: str, num_pairs: int) -> Any:
    """Seconds of each step by its number, of what shadows took in it, and the bytes of each."""
    torch.set_num_threads(1)
    layers, hidden = SHAPES[size]
    session, _ = session_in(
        folder,
        rank,
        world,
        "recovery.state=shadow",
        "recovery.fingerprint_every=0",
        "layout.sharding=full",
        f"train.steps={2 * (num_pairs + WARM_UP)}",
        f"model.decoder.layers={layers}",
        f"model.decoder.hidden={hidden}",
        "data.seq_len=128",
        "checkpoint.every=100000",
        "evaluate.every=100000",
    )
    shadows = session.shadows

    def only_when_on(call: Callable[..., None]) -> Callable[..., None]:
        def maybe(*given: Any) -> None:
            if session.step is None or is_on(session.step.number):
                call(*given)

        return maybe

    for name in ("begin", "finish", "take"):
        setattr(shadows, name, only_when_on(getattr(shadows, name)))
    text, _ = load_text(session.job)
    model = session.build(make_model(session.job, session.plan.decoder))
    optimizer = make_optimizer(model, session.job.spec.train, session.ways)
    took = {}
    for step in session.steps(model, optimizer):
        step.train(text.samples, text.num_samples)
        step.apply()
        took[step.number] = (step.seconds, step.vote_s + step.apply_s)
    (shadow,) = shadows._kept.values()
    num_bytes = sum(tensor.nbytes for _, tensor in shadow.tensors())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return took, num_bytes, shadow.room.numel(), num_parameters


def main() -> None:
    """Print steps with and without, their ratio, and the bytes."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--small", type=int, default=40, help="pairs of steps of the small model")
    asked.add_argument("--large", type=int, default=12, help="of the large one")
    asked.add_argument("--ranks", type=int, default=2)
    options = asked.parse_args()
    print(f"measured; {machine()}", flush=True)
    for size, num_pairs in (("small", options.small), ("large", options.large)):
        if not num_pairs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            scene = Scene(Path(folder))
            told = run_ranks(steps, options.ranks, scene.folder, size, num_pairs, limit_s=1200)
        took, num_bytes, sent, num_parameters = told[0]
        first = WARM_UP * 2
        pairs = [
            tuple(took[n if is_on(n) == on else n + 1] for on in (True, False))
            for n in range(first, first + 2 * num_pairs - 1, 2)
        ]
        print(f"{size}: {num_parameters / 1e6:.2f}M parameters, {options.ranks} ranks, FSDP2")
        print(f"  kept {num_bytes / 1e6:.2f} MB a rank, sent {sent / 1e6:.2f} MB a rank and step")
        for what, place in (("step", 0), ("vote and update", 1)):
            chosen = [(on[place], off[place]) for on, off in pairs]
            ratio, low, high = interval(chosen, ratio_of_medians)
            print(f"  {what}, with shadows {spread([on for on, _ in chosen], digits=4)}")
            print(f"  {what}, without      {spread([off for _, off in chosen], digits=4)}")
            print(f"  {what}, ratio {ratio:.3f} ({low:.3f} to {high:.3f}, 95 %)", flush=True)


if __name__ == "__main__":
    main()
