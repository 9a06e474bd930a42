"""What being able to recover costs while nothing fails.

    .venv/bin/python benchmarks/recovery_overhead.py [steps]

In one run of a layout on two ranks over gloo, every second step may have a comparison of all ranks'
fingerprints and a snapshot in memory, each by a coin that all ranks throw alike
(`programs/safety.py`). What a check costs is the mean of the two steps that begin
with one, less the mean of those without; the share of a step is that over the number of steps from
one check to the next as the run chose it, and so for snapshots. Each pair of steps is compared with
the median of its neighbours, so that a machine that slows down meets all alike. A warm spare
waits beside all. Settling each vote, the slots that ranks write their phase to, heartbeats and the
journal are always on: `commit_cost.py` has the first, `step_time.py` the rest against hand-written
PyTorch.
"""

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import machine, spread
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
NEIGHBOURS = 15
"""Blocks before and after one that it is compared with: some six seconds."""

BLOCK = 2
RESAMPLES = 1000

Block = tuple[float, dict[str, bool]]


def main() -> None:
    """Print what each part of safety costs, and all of it as a share of a step."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    print(f"measured; {machine()}", flush=True)
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            sets = [f"--set={each}" for each in ("layout.data=2", f"train.steps={steps}", *layout)]
            run = run_job(Path(temporary), "run", JOB, *sets)
            found = json.loads((run / "blocks.json").read_text())
        _tell(name, found)


def _tell(name: str, found: dict[str, Any]) -> None:
    intervals = {"check": found["every"], "snapshot": found["snapshots"]}
    every = {part: steps for part, steps in intervals.items() if steps}
    blocks: list[Block] = found["blocks"]
    step_s = statistics.median(seconds for seconds, _ in blocks) / BLOCK
    print(f"{name}, 2 ranks: {spread([s / BLOCK for s, _ in blocks], digits=4)} a step")
    apart = _apart(blocks)
    draws = [random.Random(i).choices(apart, k=len(apart)) for i in range(RESAMPLES)]
    for part, steps in every.items():
        costs = [_cost(each, part) for each in (apart, *draws)]
        _print(f"a {part}, one in {steps} steps", costs, 1e3, " ms")
    shares = [
        sum(_cost(each, part) / steps for part, steps in every.items()) / step_s
        for each in (apart, *draws)
    ]
    _print("all, of a step", shares, 1e2, " %")


def _apart(blocks: list[Block]) -> list[Block]:
    """Each block's seconds less the median of its neighbours'."""
    seconds = [each for each, _ in blocks]
    return [
        (each - statistics.median(seconds[max(0, i - NEIGHBOURS) : i + NEIGHBOURS + 1]), on)
        for i, (each, on) in enumerate(blocks)
    ]


def _cost(blocks: list[Block], part: str) -> float:
    """Seconds that a block with it takes more than one without."""
    with_it = [seconds for seconds, on in blocks if on[part]]
    without = [seconds for seconds, on in blocks if not on[part]]
    return statistics.fmean(with_it) - statistics.fmean(without)


def _print(what: str, values: list[float], factor: float, unit: str) -> None:
    first, *drawn = (factor * value for value in values)
    drawn.sort()
    low, high = drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn))]
    print(f"  {what}: {first:.3f}{unit} ({low:.3f} to {high:.3f}, 95 %)", flush=True)


if __name__ == "__main__":
    main()
