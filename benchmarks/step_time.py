"""A step under Paceline against the same layout by hand, with Accelerate and with Lightning Fabric.

    .venv/bin/python benchmarks/step_time.py
    .venv/bin/python benchmarks/step_time.py --steps 100 --layouts "FSDP2 over 4" --shapes tiny-lm
    pip install accelerate lightning-fabric        # for the last two; without, they are left out

All are in the same processes and take turns, step by step, in an order that goes round, so that a
change of the machine's speed meets all of them. A step of Paceline's includes everything the
session does between two steps: vote, metrics line, message to the agent. Saving and evaluation are
left out on all sides. The others' losses are compared, so that all of them do the same work. Each
ratio is of medians over paired steps, with its 95 % bootstrap interval.
"""

import argparse
import json
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from figures import interval, machine, ratio_of_medians, spread
from training import run_job

SHAPES: dict[str, dict[str, int]] = {
    "tiny-lm": {"layers": 3, "hidden": 128, "heads": 4},
    "four times its width": {"layers": 3, "hidden": 512, "heads": 8},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP over 2": (2, {"data": 2, "sharding": "none"}),
    "FSDP2 over 2": (2, {"data": 2, "sharding": "full"}),
    "TP over 2": (2, {"data": 1, "sharding": "none", "tensor": 2}),
    "DDP over 4": (4, {"data": 4, "sharding": "none"}),
    "FSDP2 over 4": (4, {"data": 4, "sharding": "full"}),
    "TP 2 x FSDP2 over 2": (4, {"data": 2, "sharding": "full", "tensor": 2}),
}
SAMPLES_A_RANK = 8


def measure(shape: str, layout: str, steps: int, warm_up: int) -> dict[str, Any]:
    """Seconds of every step by who drives it, and who is missing."""
    ranks, fields = LAYOUTS[layout]
    job = {
        "name": "step-time",
        "model": {"decoder": SHAPES[shape]},
        "data": {"corpus": "python-stdlib", "seq_len": 128},
        "cluster": {"accelerator": "cpu", "per_node": ranks},
        "train": {
            "global_batch": SAMPLES_A_RANK * fields["data"],
            "steps": steps + warm_up,
            "precision": "fp32",
        },
        "layout": {
            "tensor": 1,
            "pipeline": 1,
            "context": 1,
            "recompute": "none",
            "micro_batch": SAMPLES_A_RANK,
            **fields,
        },
        "checkpoint": {"every": 10**6},
        "evaluate": {"every": 10**6},
        "program": "overhead:train",
    }
    with tempfile.TemporaryDirectory() as temporary:
        run = run_job(Path(temporary), "run", job)
        found: dict[str, Any] = json.loads((run / "turns.json").read_text())
    return {**found, "turns": found["turns"][warm_up:]}


def main() -> None:
    """Print the spread of each and Paceline's ratio to it, and a table of the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="timed steps of each")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before those, left out")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    print(f"measured; {machine()}, {_libraries()}; gloo, {SAMPLES_A_RANK} x 128 tokens a data rank")
    table = ["| model | layout | by hand, median | by hand | Accelerate | Fabric | n |"]
    table += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for shape in options.shapes:
        for layout in options.layouts:
            found = measure(shape, layout, options.steps, options.warm_up)
            print(f"\n{shape}: {SHAPES[shape]}, {layout}", flush=True)
            table.append(_report(shape, layout, found))
    print("\nPaceline's step over theirs: ratio of medians, 95 % bootstrap interval\n")
    print("\n".join(table))


def _report(shape: str, layout: str, found: dict[str, Any]) -> str:
    turns = found["turns"]
    cells = []
    ours = [turn["Paceline"] for turn in turns]
    print(f"  {'Paceline':<12}{spread(ours, digits=4)}")
    for name in ("by hand", "Accelerate", "Fabric"):
        if name in found["missing"]:
            print(f"  {name:<12}not run: {found['missing'][name]}")
            cells.append("not run")
            continue
        theirs = [turn[name] for turn in turns]
        ratio, low, high = interval(list(zip(ours, theirs, strict=True)), ratio_of_medians)
        print(f"  {name:<12}{spread(theirs, digits=4)}")
        print(f"  {'':<12}Paceline / {name}: {ratio:.4f}, 95 % interval {low:.4f}-{high:.4f}")
        cells.append(f"{ratio:.3f} ({low:.3f}-{high:.3f})")
        if name == "by hand":
            middle = sorted(theirs)[len(theirs) // 2]
            cells.insert(0, f"{middle * 1e3:.1f} ms")
    return f"| {shape} | {layout} | {' | '.join(cells)} | {len(turns)} |"


def _libraries() -> str:
    found = []
    for package in ("accelerate", "lightning-fabric"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


if __name__ == "__main__":
    main()
