"""Random schedules of faults over the double of NCCL: how many end in a wrong state, or hang.

    .venv/bin/python benchmarks/double_soak.py                        500 schedules in all
    .venv/bin/python benchmarks/double_soak.py --at-once 3            three layouts at a time
    .venv/bin/python benchmarks/double_soak.py --schedules 60 --layouts DDP --seed 7
    .venv/bin/python benchmarks/double_soak.py --source ~/old/src     the same on another Paceline

Each layout is one `paceline drill --soak` of a tiny job whose workers compute on the device `sim`
over `nccl_double` (tests/sim): a collective returns before its data is there, and after an
abort nothing raises. The controller's word comes at once, when the host waits for the device, or
later, by chance; an aborted output holds what was there, or NaN, by chance; where three ranks or
more take part, one rank's abort lets the others' sums pass with garbage. A state is wrong when its
SHA-256 after a schedule's 12 steps is not the undisturbed run's. What is done is kept in `--runs`,
and the same command resumes it. Nothing here ran on a GPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from figures import machine

ROOT = Path(__file__).parents[1]
BEFORE = ROOT / "benchmarks" / "programs" / "before_devices"

JOB = {
    "name": "double",
    "model": {"decoder": {"layers": 1, "hidden": 16, "heads": 2}},
    "data": {"path": "text", "seq_len": 16},
    "cluster": {"accelerator": "cpu", "nodes": 1},
    "train": {
        "steps": 12,
        "global_batch": 4,
        "learning_rate": 0.003,
        "warmup_steps": 0,
        "precision": "fp32",
    },
    "checkpoint": {"every": 6, "keep_last": 2},
    "evaluate": {"every": 100_000, "samples": 4},
    "recovery": {"fingerprint_every": 0},
}

LAYOUTS = {
    "DDP": (2, ("layout.sharding=none",)),
    "FSDP2": (2, ("layout.sharding=full",)),
    "HSDP": (4, ("layout.sharding=hybrid", "layout.shard=2", "layout.data=4")),
    "TP x FSDP2": (4, ("layout.sharding=full", "layout.tensor=2", "layout.data=2")),
    "PP": (2, ("layout.pipeline=2", "layout.data=1", "model.decoder.layers=2")),
}
"""Name -> ranks, and what the job's layout is fixed to. Each has the fewest blocks it can have: a
kernel of the double costs 0.2 ms of a core."""


def main() -> None:
    options = _parse()
    print(machine(), flush=True)
    share = -(-options.schedules // len(options.layouts))
    with ThreadPoolExecutor(options.at_once) as at_once:
        rows = list(at_once.map(lambda name: _soak(name, share, options), options.layouts))
    print("\nlayout        schedules  faults  recoveries  wrong states  hangs  other")
    for name, *numbers in rows:
        print(f"{name:12}  " + "  ".join(f"{each:>9}" for each in numbers))


def _soak(name: str, schedules: int, options: argparse.Namespace) -> tuple[object, ...]:
    ranks, layout = LAYOUTS[name]
    runs = options.runs / name.replace(" ", "")
    runs.mkdir(parents=True, exist_ok=True)
    _write_job(runs, ranks)
    asked = [part for each in layout for part in ("--set", each)]
    command = [
        *(sys.executable, "-m", "paceline", "drill", "job.yaml", "--runs", str(runs)),
        *("--soak", str(schedules), "--seed", str(options.seed)),
        *("--timeout", str(options.timeout), *asked),
    ]
    subprocess.run(command, cwd=runs, env=_environment(options, ranks), check=False)
    ledger = runs / "soak.jsonl"
    texts = ledger.read_text().splitlines() if ledger.exists() else []
    lines = [json.loads(text) for text in texts]
    for line in lines:
        if not line["passed"]:
            print(f"FAILED {name} seed {line['seed']}: {line['says']}; {line['run']}", flush=True)
    wrong = [line for line in lines if "differs" in line["says"]]
    hangs = [line for line in lines if "did not reach" in line["says"] and line not in wrong]
    failed = [line for line in lines if not line["passed"]]
    return (
        *(name, len(lines), sum(line["happened"] for line in lines)),
        *(sum(line["recoveries"] for line in lines), len(wrong), len(hangs)),
        len(failed) - len(wrong) - len(hangs),
    )


def _environment(options: argparse.Namespace, ranks: int) -> dict[str, str]:
    source = options.source or ROOT / "src"
    paths = [str(ROOT), str(source)]
    if not (source / "paceline" / "runtime" / "devices.py").exists():
        paths.insert(0, str(BEFORE))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PACELINE_FORK_SERVER": "tests.sim.fork_server",
        "OMP_NUM_THREADS": "1",
        "NCCL_DOUBLE_LATE": f"any {options.seed}",
        "NCCL_DOUBLE_AFTER_ABORT": "any",
        "NCCL_DOUBLE_CONTAGION": "1" if ranks > 2 else "0",
    }


def _write_job(folder: Path, ranks: int) -> None:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    words = random.Random(5).choices(["pace", "line", "rider", "wind", "gap"], k=2000)
    (text / "0.txt").write_text(" ".join(words))
    job = JOB | {"cluster": {"accelerator": "cpu", "nodes": 1, "per_node": ranks}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=500, help="in all, over the layouts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, help="layouts at a time")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--source", type=Path, help="src/ of another checkout of Paceline")
    parser.add_argument("--runs", type=Path, help="where what is done is kept")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one run")
    options = parser.parse_args()
    options.runs = (options.runs or Path(tempfile.mkdtemp(prefix="double-soak-"))).absolute()
    print(f"runs in {options.runs}", flush=True)
    return options


if __name__ == "__main__":
    main()
