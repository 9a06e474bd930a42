"""Ranks lost in mid-epoch, with a mixture and packing on: is every sample read once an epoch?

    .venv/bin/python benchmarks/epoch_kills.py [--steps 900] [--away 20s] [--runs FOLDER]

Three runs of one job on 4 real ranks over gloo (DDP, a node each), documents of two sources packed,
weights 2 to 1, many epochs of each:

undisturbed
killed     one rank is killed in mid-epoch, twice, and replaced: 4 ranks throughout
4, 3, 4    a node is lost and stays away: 3 ranks do the same global batch, until it is back

Every step's line in `metrics.jsonl` has a hash of the step's sample ids. The ids are computed again
from (seed, step, slot), held against that hash, and counted: each sample exactly once in each whole
epoch of its source, each document in exactly one sample. The end's SHA-256 is compared where the
layout promises it: with 4 ranks throughout. With 3 ranks in between, sums are added up in another
order (docs/concepts/recovery-policy.md), and the loss of each step is compared instead. About 5
minutes on 2 cores; `--away` must be shorter than the rest of the run.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from figures import machine

from paceline.job import load_job
from paceline.prepare import Prepared, find_data, open_index
from paceline.prepare.index import PACK_DOCUMENTS
from paceline.record import events as log
from paceline.record.metrics import StepMetrics, read_all_metrics, read_metrics
from paceline.runtime.data import load_prepared
from paceline.runtime.sampling import Mixture, batch_digest, sample_ids

RANKS, BATCH, SEED = 4, 12, 7
JOB: dict[str, Any] = {
    "name": "epochs",
    "model": {"decoder": {"layers": 2, "hidden": 64, "heads": 2}},
    "data": {
        "sources": [
            {"path": "long.jsonl", "weight": 2, "name": "long"},
            {"path": "short.jsonl", "weight": 1, "name": "short"},
        ],
        "seq_len": 128,
        "pack": "documents",
        "held_out": 0.0,
    },
    "cluster": {"accelerator": "cpu", "nodes": RANKS, "per_node": 1},
    "layout": {"sharding": "none"},
    "train": {"global_batch": BATCH, "steps": 0, "precision": "fp32", "seed": SEED},
    "checkpoint": {"every": 200, "keep_last": 2},
    "recovery": {"replace_timeout": 1},
}


def main() -> None:
    """Run all three, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--away", default="20s", help="how long the lost node stays away")
    parser.add_argument("--runs", type=Path, help="where the runs are kept")
    asked = parser.parse_args()
    folder = (asked.runs or Path(tempfile.mkdtemp(prefix="epoch-kills-"))).absolute()
    write_scene(folder, asked.steps)
    print(f"{machine()}\nruns in {folder}", flush=True)
    third, half = asked.steps // 3, asked.steps // 2
    kills = [f"kill rank=2 step={third}", f"kill rank=1 step={half} phase=apply"]
    away = [f"node rank=3 step={third} for={asked.away}"]
    clean = run(folder, "undisturbed")
    killed = run(folder, "killed", "recovery.spares=1", f"drill.faults=[{', '.join(kills)}]")
    shrunk = run(folder, "shrunk", "recovery.spares=0", f"drill.faults=[{', '.join(away)}]")
    wrong = [*show(folder, clean), *show(folder, killed), *show(folder, shrunk)]
    wrong += same_bits(clean, killed) + same_to_rounding(clean, shrunk)
    for each in wrong:
        print(f"WRONG: {each}")
    sys.exit(bool(wrong))


def write_scene(folder: Path, steps: int) -> None:
    """Two sources of documents, and the job."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(5)
    words = ["pace", "line", "rider", "wind", "gap", "climb"]
    for name, count, longest in (("long", 400, 20), ("short", 300, 6)):
        rows = [" ".join(draw.choices(words, k=draw.randint(2, longest))) for _ in range(count)]
        texts = [f"{number} {row}" for number, row in enumerate(rows)]  # each one is another
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    job = JOB | {"train": JOB["train"] | {"steps": steps}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def run(folder: Path, name: str, *options: str) -> Path:
    """A run's folder, once it is through."""
    out = folder / name
    command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--no-report", "--out", name]
    asked = [part for option in options for part in ("--set", option)]
    if not out.exists():
        subprocess.run([*command, *asked], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return out


def show(folder: Path, out: Path) -> list[str]:
    """Print what a run read; returns what is wrong with it."""
    job = load_job(folder / "job.yaml")
    data = find_data(job)
    assert isinstance(data, Prepared)
    order = load_prepared(data.folder)[0].order
    assert isinstance(order, Mixture)
    lines = read_metrics(out / "metrics.jsonl")
    wrong = [*ledger(lines, job.spec.train.steps, order), *repeated(out)]
    epochs, more = count_epochs(len(lines), order)
    wrong += more + documents_twice(data.folder)
    events = log.read_events(out / "events.jsonl")
    worlds = [each.world_size for each in events if isinstance(each, log.TrainingStarted)]
    lost = [each.steps_lost for each in events if isinstance(each, log.Recovered)]
    end = next(each for each in reversed(events) if isinstance(each, log.RunFinished))
    sizes = ", ".join(
        f"{size} samples x {n} epochs" for size, n in zip(order.sizes, epochs, strict=True)
    )
    print(
        f"{out.name:12} ranks {worlds}; {len(lines)} steps x {BATCH} samples: {sizes}; recoveries "
        f"{len(lost)}, steps lost {sum(lost)}; {end.exactness}; {(end.state_digest or '')[:16]}",
        flush=True,
    )
    if out.name == "shrunk" and (3 not in worlds or worlds[-1] != RANKS):
        wrong.append(f"{out.name}: ranks were {worlds}, not 4, 3, 4: raise --steps")
    return [f"{out.name}: {each}" for each in wrong]


def ledger(lines: list[StepMetrics], steps: int, order: Mixture) -> list[str]:
    """Steps that are missing, or that read other samples than (seed, step, slot) gives."""
    wrong = [] if [line.step for line in lines] == [*range(1, steps + 1)] else ["steps are missing"]
    for line in lines:
        digest = batch_digest(line.step - 1, seed=SEED, global_batch=BATCH, num_samples=order)
        if line.samples_digest != digest:
            wrong.append(f"step {line.step} read other samples")
    return wrong


def repeated(out: Path) -> list[str]:
    """Steps that were done more often than a recovery explains."""
    times = Counter(line.step for line in read_all_metrics(out / "metrics.jsonl"))
    again = sum(times.values()) - len(times)
    events = log.read_events(out / "events.jsonl")
    allowed = sum(each.steps_lost for each in events if isinstance(each, log.Recovered))
    return [f"{again} steps were repeated, {allowed} explained"] if again > allowed else []


def count_epochs(steps: int, order: Mixture) -> tuple[list[int], list[str]]:
    """Whole epochs of each source, and samples that were not read once in one of them."""
    slots = range(BATCH)
    batches = [
        sample_ids(step, slots, seed=SEED, global_batch=BATCH, num_samples=order)
        for step in range(steps)
    ]
    ids, starts = np.concatenate(batches), np.cumsum([0, *order.sizes])
    epochs, wrong = [], []
    for source, size in enumerate(order.sizes):
        own = ids[(ids >= starts[source]) & (ids < starts[source + 1])] - starts[source]
        epochs.append(len(own) // size)
        for epoch in range(epochs[-1]):
            read = np.bincount(own[epoch * size : (epoch + 1) * size], minlength=size)
            if not (read == 1).all():
                wrong.append(f"source {source}, epoch {epoch}: {int((read != 1).sum())} samples")
    return epochs, wrong


def documents_twice(prepared: Path) -> list[str]:
    """Sources with documents that are not in exactly one sample."""
    wrong = []
    for source in open_index(prepared).train:
        packs = np.load(prepared / source.folder / PACK_DOCUMENTS)
        if not (np.bincount(packs, minlength=source.documents) == 1).all():
            wrong.append(f"documents of {source.name} are not each in one sample")
    return wrong


def same_bits(clean: Path, other: Path) -> list[str]:
    """Print both ends; returns whether they differ."""
    one, two = (digest_of(each) for each in (clean, other))
    print(f"{other.name} beside undisturbed: {'same SHA-256' if one == two else 'differs'}")
    return [] if one == two else [f"{other.name} ends with {two}, undisturbed with {one}"]


def digest_of(out: Path) -> str | None:
    ends = [e for e in log.read_events(out / "events.jsonl") if isinstance(e, log.RunFinished)]
    return ends[-1].state_digest


def same_to_rounding(clean: Path, other: Path) -> list[str]:
    """Print the largest difference of a step's loss; returns what has the wrong promise."""
    pairs = zip(*(read_metrics(each / "metrics.jsonl") for each in (clean, other)), strict=True)
    known = [(a.loss, b.loss) for a, b in pairs if a.loss is not None and b.loss is not None]
    largest = max(abs(a - b) / a for a, b in known)
    print(f"{other.name} beside undisturbed: losses differ by at most {largest:.1e} of a step's")
    return [] if largest < 1e-3 else [f"{other.name}: losses differ by {largest:.1e}"]


if __name__ == "__main__":
    main()
