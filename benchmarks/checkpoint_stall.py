"""What saving costs training: the stall, and the steps beside the write.

    .venv/bin/python benchmarks/checkpoint_stall.py [pairs]

Two ranks over gloo. Windows of ten steps in turn, one with a save at its beginning and one without.
The stall is held against a plain copy of the same bytes into memory that is kept, for a model of 25
million parameters (300 MB of float32 parameters and moments) in small steps. A window with a save
is held against the one without beside it, for 6 million parameters (76 MB) and 1,024 tokens a step:
the ranks keep both cores busy, so what a write costs is its share of the processors' time, bytes
over FLOPs, which depends on the tokens of a step alone. The first pair is left out: it starts the
writer processes and makes the memory.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import interval, machine, ratio_of_medians, spread
from training import run_job

LAYOUTS = {"none": "DDP", "full": "FSDP2"}
WINDOW = 10
"""Steps, as in programs/saving.py."""


def measure(sharding: str, pairs: int, *, hidden: int, batch: int, seq_len: int) -> dict[str, Any]:
    """What `programs/saving.py` noted on rank 0."""
    job = {
        "name": "saving",
        "model": {"decoder": {"layers": 8, "hidden": hidden, "heads": 8}},
        "data": {"corpus": "python-stdlib", "seq_len": seq_len},
        "cluster": {"accelerator": "cpu", "per_node": 2},
        "train": {"global_batch": batch, "steps": (2 * pairs + 3) * WINDOW, "precision": "fp32"},
        "layout": {"sharding": sharding, "data": 2},
        "checkpoint": {"every": 10**6, "keep_last": 2},
        "evaluate": {"every": 10**6},
        "program": "saving:train",
    }
    with tempfile.TemporaryDirectory() as temporary:
        run = run_job(Path(temporary), "run", job)
        noted: dict[str, Any] = json.loads((run / "saving.json").read_text())
    return noted


def main() -> None:
    """Print stall against copy, and windows with against windows without, for both layouts."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print(f"measured; {machine()}")
    for sharding, name in LAYOUTS.items():
        noted = measure(sharding, pairs, hidden=512, batch=2, seq_len=32)
        whole, own = noted["bytes"]
        stalls = list(zip(noted["stall"][1:], noted["copy"][1:], strict=False))
        print(f"{name}, 2 ranks: {whole / 1e6:.0f} MB saved, {own / 1e6:.0f} MB of it by rank 0")
        print(f"  stall:        {spread([stall for stall, _ in stalls])}")
        print(f"  copy:         {spread([copy for _, copy in stalls])}")
        ratio, low, high = interval(stalls, ratio_of_medians)
        print(f"  stall / copy: {ratio:.2f} ({low:.2f}-{high:.2f}, 95 %)")
        print(f"  write:        {spread(noted['write'][1:])}")
        noted = measure(sharding, pairs, hidden=256, batch=8, seq_len=128)
        windows = list(zip(noted["save"][1:], noted["plain"][1:], strict=False))
        print(f"{name}, 2 ranks: {noted['bytes'][0] / 1e6:.0f} MB saved every {WINDOW} steps")
        print(f"  {WINDOW} steps, with:    {spread([save for save, _ in windows])}")
        print(f"  {WINDOW} steps, without: {spread([plain for _, plain in windows])}")
        ratio, low, high = interval(windows, ratio_of_medians)
        print(
            f"  overhead: {ratio - 1:.1%} ({low - 1:.1%} to {high - 1:.1%}, 95 %), n = "
            f"{len(windows)} pairs; {noted['late']} saves were still being written at the end of "
            "their window"
        )
        saves = len(noted["write"])
        writer, steps = noted["writer_cpu"][0] / saves, statistics.median(noted["cpu"])
        print(
            f"  processor time of rank 0: writer {writer:.3f} s a save (its start included), "
            f"{WINDOW} steps {steps:.2f} s: {writer / steps:.1%}, n = {saves} saves"
        )


if __name__ == "__main__":
    main()
