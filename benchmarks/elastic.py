"""Measure the throughput that a run keeps when it loses one of three ranks and goes on with two.

    python benchmarks/elastic.py --runs 5 [--batch shrink]

Three CPU ranks, each a node of its own, train a small decoder at a global batch of nine, in
micro-batches of one sample; node 1 is lost in step 30 and stays away. Printed for each run: the
median tokens/s of the steps before the loss and of those after it, without the first two after it,
and their ratio. With `--batch shrink` the two that are left keep three micro-batches each. Ranks
that share too few cores keep more than two thirds: give them a core each.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.record.events import Recovered, WorldChanged, read_events
from paceline.record.metrics import read_metrics

JOB = """\
name: elastic
model: {{decoder: {{layers: 2, hidden: 64, heads: 2}}}}
data: {{path: text, seq_len: 64}}
cluster: {{accelerator: cpu, nodes: 3, per_node: 1}}
layout: {{micro_batch: 1, sharding: none}}
train: {{global_batch: 9, steps: 60, precision: fp32}}
recovery: {{spares: 0, replace_timeout: 1s, batch: {batch}}}
drill: {{faults: ["node rank=1 step=30 for=600s"]}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--batch", choices=["keep", "shrink"], default="keep")
    asked = parser.parse_args()
    kept = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(JOB.format(batch=asked.batch))
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("pace line rider wind gap\n" * 2000)
        for number in range(asked.runs):
            num_ranks, before, after = one_run(folder, f"run-{number}")
            kept.append(after / before)
            print(f"3 -> {num_ranks} ranks: {before:.0f} -> {after:.0f} tokens/s, {kept[-1]:.0%}")
    print(f"n {len(kept)}: median {statistics.median(kept):.0%}, {min(kept):.0%}-{max(kept):.0%}")


def one_run(folder: Path, out: str) -> tuple[int, float, float]:
    """Ranks after the loss, and tokens/s before and after it."""
    command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--no-report", "--out", out]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    events = read_events(folder / out / "events.jsonl")
    (changed,) = (each for each in events if isinstance(each, WorldChanged))
    (recovered,) = (each for each in events if isinstance(each, Recovered))
    last = recovered.failed_after_step
    speeds = {each.step: each.tokens_per_s for each in read_metrics(folder / out / "metrics.jsonl")}
    before = [speed for step, speed in speeds.items() if 2 < step <= last]
    after = [speed for step, speed in speeds.items() if step > last + 2]
    return changed.num_ranks, statistics.median(before), statistics.median(after)


if __name__ == "__main__":
    main()
