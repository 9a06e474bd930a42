"""kill -9 until ALL ranks have finished the next step, side by side with a plain torchrun restart.

    .venv/bin/python benchmarks/recovery.py                      every case, 30 kills each
    .venv/bin/python benchmarks/recovery.py --kills 100 --case "DDP, 4 ranks"
    .venv/bin/python benchmarks/recovery.py --hang --node        hangs and lost nodes as well

A case is one long run of the small job below, with a fault every 20 steps at a random rank and
place of a step; each waits until a warm spare is ready, so that n costs little. The same run
without faults comes first, and the states at the end must be equal. `torchrun` restarts all of
`programs/restarting.py`, hand-written DDP with the same model, from a checkpoint every 5 steps.
`torchft` (where `pip install torchft` has been) runs it as four replicas of one rank, and a new
process takes the dead one's place.
"""

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import machine
from training import PROGRAMS, run_job

from paceline.record import events as log
from paceline.record.metrics import read_metrics

JOB: dict[str, Any] = {
    "name": "recovery",
    "model": {"decoder": {"layers": 3, "hidden": 128, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 8, "steps": 40, "learning_rate": 0.003, "precision": "fp32"},
    "checkpoint": {"every": 100_000},
    "evaluate": {"every": 100_000, "samples": 32},
}

EVERY = 20
"""Steps between two faults."""

PLACES = ("start", "forward", "backward", "reduce", "vote", "apply", "applied")

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "DDP, 2 ranks": (2, ("layout.sharding=none", "layout.data=2")),
    "DDP, 4 ranks": (4, ("layout.sharding=none", "layout.data=4")),
    "DDP, 8 ranks": (8, ("layout.sharding=none", "layout.data=8")),
    "HSDP 2x2 on FSDP2": (4, ("layout.sharding=hybrid", "layout.shard=2", "layout.data=4")),
    "DDP x tensor 2, 8 ranks": (8, ("layout.sharding=none", "layout.data=4", "layout.tensor=2")),
}
"""Name -> ranks and what the job's layout is fixed to: what is left open, the planner chooses."""


def main() -> None:
    """Print every case's spread."""
    options = _options()
    print(f"measured; {machine()}; load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in options.case or CASES:
            measure_case(folder, name, "kill", options.kills)
            if options.hang:
                measure_case(folder, name, "stop", max(3, options.kills // 10))
        if options.node:
            measure_node(folder, max(3, options.kills // 10))
        if not options.case or options.torchrun:
            measure_torchrun(folder, 4, max(3, options.kills // 3))
        if not options.case or options.torchft:
            measure_torchft(folder, 4, max(3, options.kills // 3))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=30, help="faults of each case")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this one")
    parser.add_argument("--hang", action="store_true", help="SIGSTOP as well, a tenth as many")
    parser.add_argument("--node", action="store_true", help="lost nodes as well, a tenth as many")
    parser.add_argument("--torchrun", action="store_true", help="also with --case")
    parser.add_argument("--torchft", action="store_true", help="also with --case")
    return parser.parse_args()


def measure_case(folder: Path, name: str, kind: str, num: int) -> None:
    """One long run with `num` faults, and the same without."""
    ranks, layout = CASES[name]
    draw = random.Random(f"{name} {kind}")
    faults = [
        f"{kind} rank={draw.randrange(ranks)} step={EVERY * (n + 1)} "
        f"phase={draw.choice(PLACES)} when=spare"
        for n in range(num)
    ]
    settings = [f"cluster.per_node={ranks}", f"train.steps={EVERY * num + 10}", *layout]
    _report(f"{name}, {kind}", folder, settings, faults)


def measure_node(folder: Path, num: int) -> None:
    """Two nodes of two ranks; one node's every process dies at once."""
    faults = [f"node rank={2 * (n % 2)} step={EVERY * (n + 1)}" for n in range(num)]
    settings = ["cluster.nodes=2", "cluster.per_node=2", f"train.steps={EVERY * num + 10}"]
    _report(
        "DDP, 2 nodes of 2 ranks, a node lost",
        folder,
        [*settings, "layout.sharding=none", "layout.data=4"],
        faults,
    )


def _report(name: str, folder: Path, settings: Sequence[str], faults: Sequence[str]) -> None:
    asked = [f"--set={setting}" for setting in settings]
    key = "".join(each if each.isalnum() else "-" for each in name)
    calm = run_job(folder, f"calm-{key}", JOB, *asked)
    hit = run_job(folder, f"hit-{key}", JOB, *asked, f"--set=drill.faults=[{', '.join(faults)}]")
    events = log.read_events(hit / "events.jsonl")
    back = [event for event in events if isinstance(event, log.Recovered)]
    step_s = statistics.median(line.step_s for line in read_metrics(calm / "metrics.jsonl"))
    equal = digest(hit) == digest(calm)
    layout = next(event.layout for event in events if isinstance(event, log.RunStarted))
    print(f"\n{name}: {len(back)} recoveries of {len(faults)} faults; step {step_s * 1e3:.0f} ms")
    print(f"  {layout}")
    print(f"  fault to next step on all ranks: {tail([e.downtime_s for e in back])}")
    print(f"  beyond that step: {tail([max(0.0, e.downtime_s - step_s) for e in back])}")
    for label, field in (
        ("detect", "detect_s"),
        ("fence", "fence_s"),
        ("meet", "start_s"),
        ("state", "restore_s"),
        ("first step", "first_step_s"),
    ):
        values = [getattr(e, field) for e in back if getattr(e, field) is not None]
        print(f"    {label}: {tail(values)}")
    lost = sum(e.steps_lost for e in back)
    sources = sorted({e.source for e in back})
    print(
        f"  finished steps repeated: {lost}; state from {', '.join(sources)}; SHA-256 "
        f"{'equal to' if equal else 'DIFFERENT from'} the undisturbed run's",
        flush=True,
    )


def digest(run: Path) -> str | None:
    """SHA-256 of parameters and optimizer state at the end."""
    events = log.read_events(run / "events.jsonl")
    return next(e.state_digest for e in reversed(events) if isinstance(e, log.RunFinished))


def measure_torchrun(folder: Path, ranks: int, num: int) -> None:
    """The same kills under torchrun, which restarts every rank."""
    out = folder / f"torchrun-{ranks}"
    out.mkdir()
    every = 12
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "--max-restarts", str(num + 5)),
        *(str(PROGRAMS / "restarting.py"), str(out), str(num), str(every)),
    ]
    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it, restarts over gloo mostly fail
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120 * num, check=False
    )
    if not (out / "steps-0.jsonl").exists():
        print(f"\ntorchrun: no step was done; {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return
    times = _restart_times(out, ranks)
    print(f"\ntorchrun restart from a checkpoint, DDP, {ranks} ranks: {len(times)} of {num} kills")
    if times:
        print(f"  fault to next step on all ranks: {tail(times)}", flush=True)
    if done.returncode:
        print(f"  it ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")


def _restart_times(out: Path, ranks: int) -> list[float]:
    """From each kill until the last rank's first step in the next life."""
    steps = [
        [json.loads(line) for line in (out / f"steps-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]
    times = []
    for path in sorted(out.glob("kill-*")):
        life, killed_at = int(path.name.removeprefix("kill-")), json.loads(path.read_text())
        firsts = [min((t for n, _, t in mine if n > life), default=None) for mine in steps]
        if None not in firsts:
            times.append(max(t for t in firsts if t is not None) - killed_at)
    return times


def measure_torchft(folder: Path, replicas: int, num: int) -> None:
    """The same kills under torchft, which heals a new process from a live replica."""
    os.environ.setdefault("RUST_LOG", "error")  # its lighthouse tells every heartbeat
    try:
        coordination = importlib.import_module("torchft.coordination")
    except ImportError:
        print("\ntorchft: not run, it is not installed", flush=True)
        return
    out = folder / "torchft"
    out.mkdir()
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=replicas - 1)
    port = lighthouse.address().rsplit(":", 1)[1]
    environment = os.environ | {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // replicas)),
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def start(replica: int) -> "subprocess.Popen[bytes]":
        words = [str(out), str(replica), str(replicas), str(num), "12"]
        command = [sys.executable, str(PROGRAMS / "torchft_replica.py"), *words]
        with (out / f"{replica}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    running = [start(replica) for replica in range(replicas)]
    until = time.monotonic() + 60 * num
    while not (out / "end").exists() and time.monotonic() < until:
        for replica, process in enumerate(running):
            if process.poll() is not None:
                running[replica] = start(replica)
        time.sleep(0.005)
    ended = (out / "end").exists()
    for process in running:
        process.kill()
        process.wait()
    lighthouse.shutdown()
    survivors, everyone = _healing_times(out, replicas)
    kills = len(list(out.glob("kill-*")))
    print(f"\ntorchft, {replicas} replicas of one rank: {len(everyone)} of {kills} kills healed")
    print(f"  fault to the survivors' next step, a batch smaller: {tail(survivors)}")
    print(
        f"  fault to the next step of all, a new process among them: {tail(everyone)}", flush=True
    )
    if not ended:
        print(f"  it came to a stop after {kills} of {num} kills", flush=True)


def _healing_times(out: Path, replicas: int) -> tuple[list[float], list[float]]:
    """From each kill to the last survivor's next step, and to the last replica's first step among
    all."""
    steps = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(out.glob("steps-*.jsonl"))
    ]
    survivors, everyone = [], []
    for number, path in enumerate(sorted(out.glob("kill-*"), key=lambda p: int(p.name[5:]))):
        killed_at, victim = json.loads(path.read_text()), number % replicas
        after = [[each for each in mine if each[2] > killed_at] for mine in steps]
        firsts = [min((each[2] for each in mine), default=None) for mine in after]
        others = [first for rank, first in enumerate(firsts) if rank != victim]
        whole = [min((t for _, _, t, n in mine if n == replicas), default=None) for mine in after]
        if None not in others:
            survivors.append(max(t for t in others if t is not None) - killed_at)
        if None not in whole:
            everyone.append(max(t for t in whole if t is not None) - killed_at)
    return survivors, everyone


def tail(values: Sequence[float]) -> str:
    """`p50 0.31 s, p95 0.44 s, p99 0.52 s, max 0.60 s, n = 30`."""
    if not values:
        return "none"
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return (
        f"p50 {at(0.5):.3f} s, p95 {at(0.95):.3f} s, p99 {at(0.99):.3f} s, "
        f"max {ordered[-1]:.3f} s, n = {len(ordered)}"
    )


if __name__ == "__main__":
    main()
