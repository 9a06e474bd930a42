"""kill -9 to the next finished step, the steps lost, and whether the end is equal to the bit.

    .venv/bin/python benchmarks/recovery.py [n]

Each run is a whole `paceline run` of the job below on two ranks over gloo, with one SIGKILL of a
random rank at a random step and phase, layouts in turn; the clean run of each layout comes first.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import machine, spread
from training import run_job

from paceline.record import events as log

JOB: dict[str, Any] = {
    "name": "recovery",
    "model": {"decoder": {"layers": 3, "hidden": 128, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 16, "steps": 40, "learning_rate": 0.003, "precision": "fp32"},
    "checkpoint": {"every": 10},
    "evaluate": {"every": 40, "samples": 32},
}


def run(folder: Path, name: str, *options: str) -> list[log.AnyEvent]:
    """One whole run; its events."""
    return log.read_events(run_job(folder, name, JOB, *options) / "events.jsonl")


def digest(events: list[log.AnyEvent]) -> str | None:
    """SHA-256 of parameters and optimizer state at the end."""
    return next(e.state_digest for e in reversed(events) if isinstance(e, log.RunFinished))


def main() -> None:
    """Print every recovery, then the spread of each phase."""
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    draw = random.Random(0)
    recovered: list[log.Recovered] = []
    equal = 0
    print(f"measured; {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        layouts = ["none", "full"]
        sharding = "--set=layout.sharding="
        clean = {kind: digest(run(folder, kind, sharding + kind)) for kind in layouts}
        for number in range(num_runs):
            kind = layouts[number % 2]
            phase = draw.choice(["forward", "backward", "apply"])
            fault = f"rank={draw.randrange(2)}@step={draw.randint(5, 38)}@{phase}"
            events = run(
                folder,
                f"{number}",
                sharding + kind,
                f"--set=drill.kill=[{fault}]",
            )
            (one,) = (event for event in events if isinstance(event, log.Recovered))
            same = digest(events) == clean[kind]
            equal += same
            recovered.append(one)
            print(
                f"{kind:5} {fault:26} {one.downtime_s:.2f} s, {one.steps_lost} steps lost, "
                f"SHA-256 {'equal' if same else 'DIFFERENT'}",
                flush=True,
            )
    downtimes = [one.downtime_s for one in recovered]
    print(f"kill -9 to next step finished on all ranks: {spread(downtimes)}")
    for phase in ("detect_s", "fence_s", "start_s", "restore_s", "first_step_s"):
        print(f"  {phase[:-2]}: {spread([getattr(r, phase) for r in recovered])}")
    lost = [float(r.steps_lost) for r in recovered]
    print(f"finished steps done again (a checkpoint every 10): {spread(lost, 'steps', 0)}")
    print(f"SHA-256 equal to the undisturbed run: {equal} of {len(recovered)}")


if __name__ == "__main__":
    main()
