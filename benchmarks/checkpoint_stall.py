"""How long training stands still for a checkpoint, against a plain memory copy of the same bytes.

    .venv/bin/python benchmarks/checkpoint_stall.py [saves]

Two ranks over gloo, a model of 25 million parameters (300 MB of float32 parameters and moments),
a save after every fifth step, and after every step also a copy of the bytes that one rank saves.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from figures import machine, spread
from training import run_job

from paceline.record import events as log

EVERY = 5
"""Steps between saves: enough for the one before to be written."""

LAYOUTS = {"none": "DDP", "full": "FSDP2"}


def measure(sharding: str, saves: int) -> tuple[list[log.CheckpointSaved], list[list[float]]]:
    """The saves of a run, and rank 0's copies as (seconds, bytes)."""
    job = {
        "name": "saving",
        "model": {"decoder": {"layers": 8, "hidden": 512, "heads": 8}},
        "data": {"corpus": "python-stdlib", "seq_len": 32},
        "cluster": {"accelerator": "cpu", "per_node": 2},
        "train": {"global_batch": 2, "steps": (saves + 2) * EVERY, "precision": "fp32"},
        "layout": {"sharding": sharding},
        "checkpoint": {"every": EVERY, "keep_last": 2},
        "evaluate": {"every": 10**6},
        "program": "saving:train",
    }
    with tempfile.TemporaryDirectory() as temporary:
        run = run_job(Path(temporary), "run", job)
        events = log.read_events(run / "events.jsonl")
        copies = json.loads((run / "copies.json").read_text())
    return [event for event in events if isinstance(event, log.CheckpointSaved)], copies


def main() -> None:
    """Print stall, whole write and copy for both layouts."""
    saves = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    print(f"measured; {machine()}")
    for sharding, name in LAYOUTS.items():
        saved, copies = measure(sharding, saves)
        saved, copies = saved[2:], copies[2 * EVERY :]
        stalls = [event.stall_s for event in saved]
        copied = [seconds for seconds, _ in copies]
        print(
            f"{name}, 2 ranks: checkpoint of {saved[0].num_bytes / 1e6:.0f} MB, "
            f"of which rank 0 copies and writes {copies[0][1] / 1e6:.0f} MB"
        )
        print(f"  stall:  {spread(stalls)}")
        print(f"  write:  {spread([event.write_s for event in saved])}")
        print(f"  copy:   {spread(copied)}")
        ratio = statistics.median(stalls) / statistics.median(copied)
        print(f"  stall / copy: {ratio:.1f}")


if __name__ == "__main__":
    main()
