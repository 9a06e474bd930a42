"""Measure how long a run that is out of memory takes to its next finished step in another layout.

    python benchmarks/refit_time.py --runs 5

Each run has two CPU ranks and a small decoder; rank 1 runs out of memory in step 6 (the drill's
`oom`), and the newest checkpoint is of step 4. Printed for each run, in seconds: from the loss of
the rank, as recorded in `events.jsonl`, to the change of the plan, to the start of training, to the
next finished step.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.record.events import PlanChanged, TrainingStarted, WorkerLost, read_events
from paceline.record.metrics import read_all_metrics

JOB = """\
name: refit
model: {decoder: {layers: 2, hidden: 32, heads: 2}}
data: {path: text, seq_len: 32}
cluster: {accelerator: cpu, per_node: 2}
train: {global_batch: 8, steps: 12, precision: fp32}
checkpoint: {every: 4}
recovery: {on_oom: refit}
drill: {faults: ["oom rank=1 step=6"]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    took = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(JOB)
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("pace line rider wind gap\n" * 2000)
        for number in range(asked.runs):
            took.append(one_run(folder, f"run-{number}"))
            planned, started, stepped = took[-1]
            print(f"plan {planned:.2f} s, training {started:.2f} s, step {stepped:.2f} s")
    steps = sorted(stepped for _, _, stepped in took)
    print(
        f"n {len(steps)}: median {statistics.median(steps):.2f} s, {steps[0]:.2f}-{steps[-1]:.2f}"
    )


def one_run(folder: Path, out: str) -> tuple[float, float, float]:
    command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--no-report", "--out", out]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    events = read_events(folder / out / "events.jsonl")
    (lost,) = (each.at for each in events if isinstance(each, WorkerLost))
    (changed,) = (each.at for each in events if isinstance(each, PlanChanged))
    started = max(each.at for each in events if isinstance(each, TrainingStarted))
    lines = read_all_metrics(folder / out / "metrics.jsonl")
    stepped = min(line.at for line in lines if line.at > changed)
    return changed - lost, started - lost, stepped - lost


if __name__ == "__main__":
    main()
