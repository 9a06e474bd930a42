"""What being able to recover costs while nothing fails.

    .venv/bin/python benchmarks/recovery_overhead.py [pairs]

Whole runs of one job on two ranks over gloo, in turn with everything on (a warm spare, fingerprints
and snapshots as often as they are by default) and with what can be switched off off. The slots that
ranks write their phase to, heartbeats and the journal are always on: what they cost is part of the
ratio to hand-written PyTorch that `benchmarks/step_time.py` prints. Steps with an evaluation or a
checkpoint are left out of both, as are the first ones.
"""

import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import interval, machine, ratio_of_medians, spread
from training import run_job

from paceline.record.metrics import read_metrics

JOB: dict[str, Any] = {
    "name": "overhead",
    "model": {"decoder": {"layers": 4, "hidden": 256, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 16, "steps": 120, "precision": "fp32"},
    "checkpoint": {"every": 10**6},
    "evaluate": {"every": 10**6, "samples": 16},
}
WARM_UP = 20
"""Steps in which a spare is still starting."""

OFF = ("recovery.spares=0", "recovery.fingerprint_every=0", "recovery.snapshot_every=0")
LAYOUTS = {"DDP": (), "FSDP2": ("layout.sharding=full",)}


def step_s(folder: Path, name: str, *options: str) -> float:
    """Median step of one whole run, from the end of one step to that of the next."""
    sets = tuple(f"--set={option}" for option in ("layout.data=2", *options))
    lines = read_metrics(run_job(folder, name, JOB, *sets) / "metrics.jsonl")
    ends = [line.at for line in lines[WARM_UP:-1]]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def main() -> None:
    """Print the step with and without, and their ratio."""
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(f"measured; {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, layout in LAYOUTS.items():
            pairs = []
            for number in range(num_pairs):
                settings = [("on", ()), ("off", OFF)]
                if number % 2:
                    settings.reverse()
                took = {
                    kind: step_s(folder, f"{name}-{number}-{kind}", *layout, *options)
                    for kind, options in settings
                }
                pairs.append((took["on"], took["off"]))
                print(
                    f"{name} {number}: on {took['on']:.4f} s, off {took['off']:.4f} s", flush=True
                )
            ratio, low, high = interval(pairs, ratio_of_medians)
            print(f"{name}, 2 ranks, on:  {spread([on for on, _ in pairs], digits=4)}")
            print(f"{name}, 2 ranks, off: {spread([off for _, off in pairs], digits=4)}")
            print(f"{name}, overhead: {ratio - 1:.2%} ({low - 1:.2%} to {high - 1:.2%}, 95 %)")


if __name__ == "__main__":
    main()
