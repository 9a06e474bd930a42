"""What being able to recover costs while nothing fails.

    .venv/bin/python benchmarks/recovery_overhead.py [least pairs]

In one run of a layout on two ranks over gloo, the same ranks train blocks of steps with everything
on that is on by default (fingerprints, snapshots, settling each vote) and with all of it off, in
turn (`programs/safety.py`). A pair is two neighbouring blocks. A warm spare waits beside both; the
slots that ranks write their phase to, heartbeats and the journal are on in both:
`benchmarks/step_time.py` has what they cost against hand-written PyTorch.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import interval, machine, spread
from training import run_job

JOB: dict[str, Any] = {
    "name": "overhead",
    "model": {"decoder": {"layers": 3, "hidden": 128, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 16, "precision": "fp32"},
    "checkpoint": {"every": 10**6},
    "evaluate": {"every": 10**6, "samples": 16},
    "program": "safety:train",
}
LAYOUTS = {"DDP": ("layout.sharding=none",), "FSDP2": ("layout.sharding=full",)}
MOST_EVERY = 40
"""Longest block that the number of steps leaves room for: shorter blocks make more pairs."""


def ratio_of_sums(pairs: Any) -> float:
    """Seconds of all blocks with safety over those of all blocks without."""
    return sum(on for on, _ in pairs) / sum(off for _, off in pairs)


def main() -> None:
    """Print the step with and without, and their ratio."""
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    print(f"measured; {machine()}", flush=True)
    steps = 21 + 2 * num_pairs * MOST_EVERY
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            sets = [f"--set={each}" for each in ("layout.data=2", f"train.steps={steps}", *layout)]
            run = run_job(Path(temporary), "run", JOB, *sets)
            found = json.loads((run / "blocks.json").read_text())
        blocks, length = found["blocks"], found["length"]
        pairs = []
        for first, second in zip(blocks[::2], blocks[1::2], strict=False):
            on, off = (first, second) if first[0] else (second, first)
            pairs.append((on[1] / length, off[1] / length))
        ratio, low, high = interval(pairs, ratio_of_sums)
        print(
            f"{name}, 2 ranks: fingerprints every {found['every']} steps, blocks of {length} steps"
        )
        print(f"  on:  {spread([on for on, _ in pairs], digits=4)}")
        print(f"  off: {spread([off for _, off in pairs], digits=4)}")
        print(f"  cost: {ratio - 1:.2%} ({low - 1:.2%} to {high - 1:.2%}, 95 %)", flush=True)


if __name__ == "__main__":
    main()
