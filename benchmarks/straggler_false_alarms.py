"""How often a rank that is not slow is named a straggler, and how soon one that is.

    .venv/bin/python benchmarks/straggler_false_alarms.py [--runs 200] [--steps 1000] [--losses]

Monte Carlo over runs of ranks that do the same work: their own times of each step are drawn from
normal, lognormal and Student-t noise of several widths, with noise that lasts for some steps, and
from the own times that the ranks of a real run under load had, each rank's divided by its median.
A false alarm is any rank named in a run in which none is slow. Then one rank is made 1.5 times as
slow, and the step in which it is named is printed. With `--losses` the drawn numbers are the mean
losses of ranks over their own samples, and the odd rank has 1.5 times its peers'.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from detector_false_alarms import JOB, load
from figures import machine
from numpy.typing import NDArray
from training import run_job

from paceline.control.stragglers import LossOutliers, Stragglers
from paceline.record.metrics import read_metrics

Array = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Array]
"""(draw, steps, ranks) -> factors around 1."""


def normal(width: float) -> Noise:
    def noise(draw: np.random.Generator, steps: int, ranks: int) -> Array:
        return np.maximum(0.1, 1 + width * draw.standard_normal((steps, ranks)))

    return noise


def lognormal(width: float) -> Noise:
    return lambda draw, steps, ranks: draw.lognormal(0.0, width, (steps, ranks))


def student(width: float) -> Noise:
    """Heavy tails: three degrees of freedom, in the logarithm."""
    return lambda draw, steps, ranks: np.exp(width * draw.standard_t(3, (steps, ranks)))


def lasting(width: float, memory: float) -> Noise:
    """Lognormal noise of which a share is kept from step to step."""

    def noise(draw: np.random.Generator, steps: int, ranks: int) -> Array:
        fresh = width * (1 - memory**2) ** 0.5 * draw.standard_normal((steps, ranks))
        logs = np.zeros((steps, ranks))
        for step in range(1, steps):
            logs[step] = memory * logs[step - 1] + fresh[step]
        return np.exp(logs)

    return noise


def recorded(times: Array) -> Noise:
    """Blocks of ten successive steps of the recorded ones, drawn for each rank by itself."""
    relative = times / np.median(times, axis=0)

    def noise(draw: np.random.Generator, steps: int, ranks: int) -> Array:
        blocks = -(-steps // 10)
        columns = []
        for _ in range(ranks):
            starts = draw.integers(0, len(relative) - 10, blocks)
            column = relative[:, draw.integers(0, relative.shape[1])]
            columns.append(np.concatenate([column[at : at + 10] for at in starts])[:steps])
        return np.stack(columns, axis=1)

    return noise


def real_times(num_steps: int, num_busy: int) -> Array:
    """Own times of the steps of a real run under load; one column, of rank 0."""
    with tempfile.TemporaryDirectory() as temporary, load(num_busy):
        made = run_job(Path(temporary), "loaded", JOB, f"--set=train.steps={num_steps}")
        steps = read_metrics(made / "metrics.jsonl")[1:]
    return np.array([[step.forward_s + step.backward_s] for step in steps])


def upper_bound(found: int, tried: int) -> float:
    """95 % upper bound of a rate, by Wilson's interval; 3 in n when none was found."""
    if found == 0:
        return 3 / tried
    rate, z = found / tried, 1.96
    middle = rate + z * z / (2 * tried)
    half = z * (rate * (1 - rate) / tried + z * z / (4 * tried * tried)) ** 0.5
    return (middle + half) / (1 + z * z / tried)


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="of each kind of noise")
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--losses", action="store_true", help="judge losses instead of times")
    parser.add_argument("--real", type=int, default=300, help="steps of the real run")
    options = parser.parse_args()
    print(f"measured and simulated; {machine()}", flush=True)
    noises: dict[str, Noise] = {
        "normal 2 %": normal(0.02),
        "normal 10 %": normal(0.1),
        "lognormal 0.3": lognormal(0.3),
        "Student t3 0.1": student(0.1),
        "Student t3 0.3": student(0.3),
        "lasting 0.1, half kept": lasting(0.1, 0.5),
        "lasting 0.1, 0.9 kept": lasting(0.1, 0.9),
        "lognormal 0.2" if options.losses else "recorded under load": recorded(
            real_times(options.real, num_busy=4)
        )
        if options.real and not options.losses
        else lognormal(0.2),
    }

    def judge(num_ranks: int) -> Stragglers | LossOutliers:
        peers = [range(num_ranks)]
        return LossOutliers(peers, [1.0] * num_ranks) if options.losses else Stragglers(peers)

    for num_ranks in (3, 8, 64) if options.losses else (2, 4, 8, 64):
        for name, noise in noises.items():
            draw = np.random.default_rng(0)
            alarms, named_at, others = 0, [], 0
            for _ in range(options.runs):
                stragglers = judge(num_ranks)
                times = noise(draw, options.steps, num_ranks)
                alarms += sum(len(stragglers.add(row.tolist())) for row in times) > 0
                slow = noise(draw, 200, num_ranks)
                slow[:, 1] *= 1.5
                stragglers = judge(num_ranks)
                first = None
                for step, row in enumerate(slow, 1):
                    found = stragglers.add(row.tolist())
                    others += any(one.rank != 1 for one in found)
                    if first is None and any(one.rank == 1 for one in found):
                        first = step
                named_at.append(first or np.inf)
            within = sum(step <= 20 for step in named_at)
            never = sum(step == np.inf for step in named_at)
            bound = upper_bound(alarms, options.runs)
            print(
                f"{num_ranks:3} ranks, {name:22}: false alarms in {alarms} of {options.runs} runs "
                f"of {options.steps} steps (95 % bound {bound:.3f}); 1.5x named within 20 steps in "
                f"{within}, median step {np.median(named_at):.0f}, never in {never}, another "
                f"blamed in {others}",
                flush=True,
            )


if __name__ == "__main__":
    main()
