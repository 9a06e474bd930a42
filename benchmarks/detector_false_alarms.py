"""How often the hang detector would end a worker that is only slow: clean steps, none stuck.

    .venv/bin/python benchmarks/detector_false_alarms.py [--steps 10000] [--real 400]

First a real run under load: two ranks over gloo on a machine with twice as many busy processes as
cores, detector on; every fence is a false one. Then simulated runs of at least `--steps` steps: the
phases of the recorded steps drawn at random, made longer to be like larger models, and disturbed in
the ways of row 32 of the fault matrix. The detector is the product's own `Patience`, fed as an
agent feeds it. Last, the same with other constants, which is where the product's come from.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import machine, spread
from training import run_job

from paceline.control import adaptive_timeouts as rules
from paceline.control.adaptive_timeouts import Patience
from paceline.control.slots import Duration, Phase
from paceline.job import RecoverySpec
from paceline.record import events as log
from paceline.record.metrics import StepMetrics, read_metrics

JOB: dict[str, Any] = {
    "name": "clean",
    "model": {"decoder": {"layers": 3, "hidden": 128, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 128},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 16, "learning_rate": 0.003, "precision": "fp32"},
    "checkpoint": {"every": 10},
    "evaluate": {"every": 50, "samples": 32},
}
NUM_RANKS = 4
STEP_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.VOTE, Phase.APPLY)
FLOOR_S = RecoverySpec().patience

Times = dict[Phase, float]
Disturb = Callable[[random.Random, int, Times], Times]


@dataclass
class Count:
    """Alarms among phases that ended by themselves."""

    phases: int = 0
    looks: int = 0
    """Beyond the suspect limit: looked at more closely, fenced only if the kernel says stopped."""

    fences: int = 0

    def __str__(self) -> str:
        upper = 3 / self.phases if self.fences == 0 and self.phases else None
        bound = f" (95 % upper bound {upper:.1e} a phase)" if upper is not None else ""
        return f"{self.fences} false fences{bound}, {self.looks} looks, n = {self.phases} phases"


def as_it_is(draw: random.Random, step: int, times: Times) -> Times:
    """Nothing but what was recorded."""
    return times


def heavy_tail(draw: random.Random, step: int, times: Times) -> Times:
    """One phase in twenty takes a Pareto factor (tail index 2.5), at most 10."""
    return {p: s * (min(10, draw.paretovariate(2.5)) if draw.random() < 0.05 else 1)
            for p, s in times.items()}  # fmt: skip


def heavier_tail(draw: random.Random, step: int, times: Times) -> Times:
    """The same without the bound: no time-out is safe from it, so this says how unsafe."""
    return {p: s * (draw.paretovariate(2.5) if draw.random() < 0.05 else 1)
            for p, s in times.items()}  # fmt: skip


def collections(draw: random.Random, step: int, times: Times) -> Times:
    """Garbage collections: 0.5-2 s more in one phase of every 200."""
    return {p: s + (draw.uniform(0.5, 2) if draw.random() < 0.005 else 0) for p, s in times.items()}


def tenfold(draw: random.Random, step: int, times: Times) -> Times:
    """Every hundredth step takes ten times as long, first at step 30."""
    return {p: s * (10 if step % 100 == 30 else 1) for p, s in times.items()}


def stalls(draw: random.Random, step: int, times: Times) -> Times:
    """A save every ten steps of about half a second, every fiftieth of them ten times that."""
    if step % 10:
        return times
    long = 10 if step % 500 == 0 else 1
    return times | {Phase.SAVE: draw.lognormvariate(-0.7, 0.8) * long}


def throttled(draw: random.Random, step: int, times: Times) -> Times:
    """Three times as slow from step 5,000 on, back at 8,000."""
    return {p: s * (3 if 5000 <= step < 8000 else 1) for p, s in times.items()}


def paused(draw: random.Random, step: int, times: Times) -> Times:
    """The whole machine stands still for 3 s every thousand steps, in whatever phase."""
    if step % 1000 != 500:
        return times
    phase = draw.choice(STEP_PHASES)
    return times | {phase: times[phase] + 3.0}


DISTURBANCES: dict[str, Disturb] = {
    "as recorded": as_it_is,
    "heavy tail, to 10x": heavy_tail,
    "garbage collections": collections,
    "10x long steps": tenfold,
    "checkpoint stalls": stalls,
    "throttled 3x": throttled,
    "machine paused 3 s": paused,
}
SCALES = (1.0, 20.0, 200.0)
"""Recorded steps made this many times as long."""


def simulate(
    recorded: list[Times], disturb: Disturb, *, scale: float, num_steps: int, floor_s: float
) -> Count:
    """Alarms of one simulated run."""
    draw = random.Random(0)
    patience, count = Patience(floor_s=floor_s), Count()
    for step in range(1, num_steps + 1):
        done: list[Duration] = []
        for _ in range(NUM_RANKS):
            times = {p: s * scale for p, s in draw.choice(recorded).items()}
            for phase, seconds in disturb(draw, step, times).items():
                limits = patience.limits(phase, is_first_step=step == 1)
                count.phases += 1
                count.looks += seconds > limits.suspect_s
                count.fences += seconds > limits.fence_s
                done.append(Duration(phase, step == 1, seconds))
        patience.learn(done)
    return count


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Busy processes besides."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def real_run(folder: Path, num_steps: int, num_busy: int) -> list[StepMetrics]:
    """A clean run under load; prints its alarms."""
    with load(num_busy):
        made = run_job(folder, "loaded", JOB, f"--set=train.steps={num_steps}")
    events = log.read_events(made / "events.jsonl")
    stuck = [event for event in events if type(event).__name__ == "WorkerStuck"]
    lost = [event for event in events if isinstance(event, log.WorkerLost)]
    steps = read_metrics(made / "metrics.jsonl")
    print(f"real run, {num_busy} busy processes besides: {len(steps)} steps, 2 ranks")
    print(f"  step: {spread([step.step_s for step in steps])}")
    print(f"  called stuck: {len(stuck)}, workers lost: {len(lost)}", flush=True)
    return steps


def main() -> None:
    """Print the alarms of each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of each simulated run")
    parser.add_argument("--real", type=int, default=400, help="steps of the real run")
    parser.add_argument("--busy", type=int, default=4, help="busy processes beside the real run")
    options = parser.parse_args()
    print(f"measured; {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        steps = real_run(Path(temporary), options.real, options.busy)
    recorded = [
        {
            Phase.FORWARD: step.forward_s,
            Phase.BACKWARD: step.backward_s,
            Phase.VOTE: step.vote_s,
            Phase.APPLY: step.apply_s,
        }
        for step in steps[1:]
    ]
    print(f"simulated from them: {options.steps} steps, {NUM_RANKS} ranks, floor {FLOOR_S} s")
    total = Count()
    for scale in SCALES:
        for name, disturb in DISTURBANCES.items():
            one = simulate(recorded, disturb, scale=scale, num_steps=options.steps, floor_s=FLOOR_S)
            print(f"  {scale:5.0f}x, {name:20}: {one}", flush=True)
            for field in ("phases", "looks", "fences"):
                setattr(total, field, getattr(total, field) + getattr(one, field))
    print(f"all of them: {total}")
    for scale in SCALES:
        one = simulate(
            recorded, heavier_tail, scale=scale, num_steps=options.steps, floor_s=FLOOR_S
        )
        print(f"  {scale:5.0f}x, unbounded heavy tail: {one}", flush=True)
    print("other constants: false fences of all disturbances and lengths together")
    for floor_s in (0.5, 1.0, 2.0, FLOOR_S):
        for spreads, times_usual in ((5.0, 1.0), (20.0, 1.0), (5.0, 12.0), (20.0, 12.0)):
            rules.SPREADS, rules.TIMES_USUAL = spreads, times_usual
            counts = [
                simulate(
                    recorded, disturb, scale=scale, num_steps=options.steps // 10, floor_s=floor_s
                )
                for scale in SCALES
                for disturb in DISTURBANCES.values()
            ]
            fences, looks = (sum(getattr(c, f) for c in counts) for f in ("fences", "looks"))
            phases = sum(c.phases for c in counts)
            print(
                f"  floor {floor_s:3.1f} s, median + {spreads:2.0f} MAD, {times_usual:2.0f} x "
                f"usual: {fences} fences, {looks} looks, n = {phases}",
                flush=True,
            )


if __name__ == "__main__":
    main()
