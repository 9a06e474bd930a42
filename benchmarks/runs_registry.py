"""How long `paceline runs` and `paceline runs compare` take over many long runs: whole processes.

.venv/bin/python benchmarks/runs_registry.py FOLDER [--runs 1000] [--lines 10000] [--n 20]

The runs are made in FOLDER the first time: resolved job files that differ in learning rate and
seed, their plan, events for every hundredth step, and the metrics. There are twenty files of
metrics, which the runs share as hard links (82 MB); with `--whole` each has its own (4.1 GB).
The figures are processor time and wall time of the whole process, with the start of Python. Cold is
without an index; the files are in the page cache, as far as they fit.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import msgspec
from figures import machine, spread

from paceline.job import dump_job, load_job
from paceline.plan import plan_job, plan_to_json
from paceline.record.events import CheckpointSaved, Evaluated, RunFinished, RunStarted

ROOT = Path(__file__).parent.parent
AT = 1_795_000_000.0
NUM_METRICS = 20


def make_runs(folder: Path, num_runs: int, num_lines: int, *, whole: bool) -> None:
    """Folders of runs that were finished."""
    shared = folder / "metrics"
    shared.mkdir(parents=True)
    for number in range(min(NUM_METRICS, num_runs)):
        write_metrics(shared / f"{number}.jsonl", num_lines, random.Random(number))
    job_file = ROOT / "examples/tiny-lm/job.yaml"
    plan = plan_to_json(plan_job(load_job(job_file)))
    for number in range(num_runs):
        run = folder / "runs" / f"tiny-lm-{number:05}"
        (run / "checkpoints").mkdir(parents=True)
        changed = [f"train.learning_rate={1e-4 * (1 + number)}", f"train.seed={number}"]
        job = load_job(job_file, [*changed, f"train.steps={num_lines}"])
        (run / "job.yaml").write_text(dump_job(job.spec))
        (run / "plan.json").write_bytes(plan)
        info = {"name": "tiny-lm", "job_folder": str(ROOT), "created_at": AT + number}
        (run / "run.json").write_text(json.dumps(info, indent=2))
        write_events(run / "events.jsonl", num_lines)
        metrics = shared / f"{number % NUM_METRICS}.jsonl"
        (shutil.copyfile if whole else os.link)(metrics, run / "metrics.jsonl")


def write_metrics(path: Path, num_lines: int, draw: random.Random) -> None:
    """Lines as long as a run's."""
    with path.open("w") as file:
        for step in range(1, num_lines + 1):
            line = {"step": step, "generation": 1, "at": AT + step}
            line |= {"loss": 2.0 + math.exp(-step / 999) + 0.1 * draw.random()}
            line |= {"grad_norm": draw.random(), "learning_rate": 3e-4 * draw.random()}
            line |= {"tokens_per_s": 1e5 * draw.random(), "step_s": draw.random()}
            line |= dict.fromkeys(("forward_s", "backward_s", "vote_s", "apply_s"), draw.random())
            line |= {"memory_bytes": 983363584, "applied": True, "samples_digest": f"{step:016x}"}
            line |= {"data_s": draw.random(), "reserved_bytes": None, "mfu": draw.random()}
            line |= {"accuracy": None, "state_digest": None, "logged": {}}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def write_events(path: Path, num_lines: int) -> None:
    """A start, a save and an evaluation every hundred steps, an end."""
    lines = []
    size = {"num_ranks": 2, "num_nodes": 1, "num_steps": num_lines}
    lines.append(RunStarted(at=AT, resumed=False, layout="DDP over 2 ranks", versions={}, **size))
    for step in range(100, num_lines + 1, 100):
        lines.append(Evaluated(at=AT + step, step=step, loss=2.0 + 1 / step, seconds=0.1))
        name = f"step-{step:08}"
        took = {"num_bytes": 1_000_000, "stall_s": 0.1, "write_s": 0.2}
        lines.append(CheckpointSaved(at=AT + step, step=step, checkpoint=name, **took))
    end = {"state_digest": "ab" * 32, "held_out_loss": 2.0, "restarts": 0, "reason": None}
    peaks = {"baseline_bytes": [1, 1], "peak_bytes": [983363584, 981110784]}
    lines.append(RunFinished(at=AT + num_lines, outcome="finished", step=num_lines, **end, **peaks))
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def timed(*words: str, cache: Path) -> tuple[float, float]:
    """Processor and wall seconds of `paceline WORDS`."""
    command = [sys.executable, "-m", "paceline", *words]
    began = perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return used.ru_utime + used.ru_stime, perf_counter() - began


def show(what: str, goal: str, taken: list[tuple[float, float]]) -> None:
    """Print both spreads."""
    print(f"{what} (goal {goal})")
    print(f"  processor  {spread([used for used, _ in taken])}")
    print(f"  wall       {spread([wall for _, wall in taken])}", flush=True)


def main() -> None:
    """Make the runs where they are not there, and time every command n times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--whole", action="store_true")
    asked = parser.parse_args()
    if not (asked.folder / "runs").exists():
        make_runs(asked.folder, asked.runs, asked.lines, whole=asked.whole)
    runs, cache = asked.folder / "runs", asked.folder / "cache"
    listing = ("runs", "--runs", str(runs))
    cold = []
    for _ in range(max(3, asked.n // 4)):
        shutil.rmtree(cache, ignore_errors=True)
        cold.append(timed(*listing, cache=cache))
    warm, grown, chosen, compared, started = [], [], [], [], []
    where = ("--where", "eval_loss<3 and train.learning_rate>0.01", "--sort", "-loss")
    for number in range(asked.n):
        warm.append(timed(*listing, cache=cache))
        chosen.append(timed(*listing, *where, cache=cache))
        a, b = (str(runs / f"tiny-lm-{i:05}") for i in (0, 1))
        compared.append(timed("runs", "compare", a, b, cache=cache))
        with (runs / f"tiny-lm-{number:05}" / "events.jsonl").open("a") as file:
            file.write('{"event":"Noted","at":1.0,"text":"grown"}\n')
        grown.append(timed(*listing, cache=cache))
        started.append(timed("--version", cache=cache))
    count = len(list(runs.iterdir()))
    print(f"measured; {machine()}; load {os.getloadavg()[0]:.1f}")
    print(f"{count:,} runs of {asked.lines:,} lines")
    show("paceline runs, without an index", "3 s of processor time", cold)
    show("paceline runs", "0.3 s", warm)
    show("paceline runs, after one run grew", "0.3 s", grown)
    show("paceline runs --where with a setting, --sort", "0.3 s", chosen)
    show("paceline runs compare of two", "0.5 s", compared)
    show("paceline --version, for comparison", "none", started)


if __name__ == "__main__":
    main()
