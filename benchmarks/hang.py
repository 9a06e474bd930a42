"""From a hang to the next finished step: stopped, deadlocked, looping, interpreter held.

    .venv/bin/python benchmarks/hang.py [--rounds 3] [--patience 2]

Whole runs of the job below on two ranks over gloo. In each, every kind of hang happens once, to
random ranks, in random phases, with a warm spare ready. Printed: whether it was called what it
is, how long it stood still beside its learned limit, from the fault to the next step of all ranks,
and whether the end is equal to the bit.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from figures import machine, spread
from training import run_job

from paceline.record import events as log

JOB: dict[str, Any] = {
    "name": "hang",
    "model": {"decoder": {"layers": 2, "hidden": 64, "heads": 2}},
    "data": {"corpus": "python-stdlib", "seq_len": 64},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 8, "steps": 200, "learning_rate": 0.003, "precision": "fp32"},
    "checkpoint": {"every": 50},
    "evaluate": {"every": 200, "samples": 32},
}
KINDS = {"stop": "stopped", "deadlock": "waiting", "gil": "gil held", "loop": "looping"}


def run(folder: Path, name: str, *options: str) -> list[log.AnyEvent]:
    """One whole run; its events."""
    return log.read_events(run_job(folder, name, JOB, *options) / "events.jsonl")


def digest(events: list[log.AnyEvent]) -> str | None:
    """SHA-256 of parameters and optimizer state at the end."""
    return next(e.state_digest for e in reversed(events) if isinstance(e, log.RunFinished))


def main() -> None:
    """Print every hang, then the spreads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs, each with one hang a kind")
    parser.add_argument("--patience", type=float, default=2.0, help="recovery.patience in seconds")
    options = parser.parse_args()
    draw = random.Random(0)
    beyond: dict[str, list[float]] = {kind: [] for kind in KINDS}
    right = equal = wrong = 0
    print(f"measured; {machine()}; recovery.patience {options.patience:g} s", flush=True)
    patience = f"--set=recovery.patience={options.patience}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clean = digest(run(folder, "clean", patience))
        for number in range(options.rounds):
            faults = [
                f"{kind} rank={draw.randrange(2)} step={40 * (at + 1)} "
                f"phase={draw.choice(['forward', 'backward', 'vote'])} when=spare"
                for at, kind in enumerate(draw.sample(list(KINDS), len(KINDS)))
            ]
            events = run(folder, f"{number}", patience, f"--set=drill.faults=[{', '.join(faults)}]")
            stuck = [event for event in events if isinstance(event, log.WorkerStuck)]
            done = [event for event in events if isinstance(event, log.Recovered)]
            happened = [event for event in events if isinstance(event, log.FaultInjected)]
            wrong += len(stuck) - len(faults)
            same = digest(events) == clean
            equal += same
            for fault, one, recovered in zip(happened, stuck, done, strict=False):
                kind = fault.fault.split()[0]
                right += one.kind == KINDS[kind] and one.rank == fault.rank
                limit_s = one.limit_s or 0.0
                beyond[kind].append(recovered.downtime_s - limit_s)
                print(
                    f"  {fault.fault:45} called {one.kind}, in {one.phase}; limit {limit_s:.2f} s, "
                    f"stood {one.waited_s:.2f} s, next step after {recovered.downtime_s:.2f} s, "
                    f"{recovered.steps_lost} steps lost",
                    flush=True,
                )
            print(f"run {number}: SHA-256 {'equal' if same else 'DIFFERENT'}", flush=True)
    for kind, values in beyond.items():
        if values:
            print(f"{kind}: fault to next step, less the limit: {spread(values)}")
    everything = [value for values in beyond.values() for value in values]
    print(f"all: fault to next step, less the limit: {spread(everything)}")
    print(f"called what it is, of the right rank: {right} of {len(everything)}")
    print(f"others called stuck: {wrong}; SHA-256 equal in {equal} of {options.rounds} runs")


if __name__ == "__main__":
    main()
