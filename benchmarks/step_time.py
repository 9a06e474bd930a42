"""A step under Paceline against a hand-written PyTorch DDP loop of the same model.

    .venv/bin/python benchmarks/step_time.py [steps]

Both are in the same two processes and take turns, step by step, so that a change of the machine's
speed meets both. A step of Paceline's includes everything the session does between two steps:
vote, metrics line, message to the agent. Saving and evaluation are left out on both sides.
"""

import json
import sys
import tempfile
from pathlib import Path

from figures import interval, machine, ratio_of_medians, spread
from training import run_job

SHAPES = {
    "examples/tiny-lm": {"layers": 3, "hidden": 128, "heads": 4},
    "four times its width": {"layers": 3, "hidden": 512, "heads": 8},
}
WARM_UP = 20
"""Steps left out at the start."""


def measure(decoder: dict[str, int], steps: int) -> list[tuple[float, float]]:
    """Pairs of (Paceline, plain) step times on rank 0."""
    job = {
        "name": "step-time",
        "model": {"decoder": decoder},
        "data": {"corpus": "python-stdlib", "seq_len": 128},
        "cluster": {"accelerator": "cpu", "per_node": 2},
        "train": {"global_batch": 16, "steps": steps + WARM_UP, "precision": "fp32"},
        "layout": {"sharding": "none", "micro_batch": 8},
        "checkpoint": {"every": 10**6},
        "evaluate": {"every": 10**6},
        "program": "overhead:train",
    }
    with tempfile.TemporaryDirectory() as temporary:
        run = run_job(Path(temporary), "run", job)
        pairs = json.loads((run / "pairs.json").read_text())
    return [(ours, plain) for ours, plain in pairs[WARM_UP:]]


def main() -> None:
    """Print both spreads and the ratio with its interval, for each size."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    print(f"measured; {machine()}")
    for name, decoder in SHAPES.items():
        pairs = measure(decoder, steps)
        ratio, low, high = interval(pairs, ratio_of_medians)
        print(f"{name}: {decoder}, 2 ranks over gloo, 8 x 128 tokens a rank")
        print(f"  Paceline:      {spread([ours for ours, _ in pairs], digits=4)}")
        print(f"  plain PyTorch: {spread([plain for _, plain in pairs], digits=4)}")
        print(f"  ratio of medians {ratio:.4f}, 95 % bootstrap interval {low:.4f}-{high:.4f}")


if __name__ == "__main__":
    main()
