"""What alerts and samples of machines cost: each sample, and the steps of a run beside them.

    .venv/bin/python benchmarks/alerts_cost.py                 all of it, about 5 minutes
    .venv/bin/python benchmarks/alerts_cost.py --steps 0       without the run

Samples: seconds of a step's line through the built-in rules, of a look at a run's folder without
news, and of one sample of this machine; each also as a share of the time between two of them. Run:
two real ranks over gloo. A second watch over alerts and a second sampler of the machine, like those
that the run has anyway, are switched on and off beside it in turns of `--window` steps, by a
process of their own. Each turn with them is compared with the one before, without: the cost of all
of it once more.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from figures import interval, machine, ratio_of_medians, spread

from paceline.control.alerts import Rules
from paceline.control.sampling import EVERY_S, Host, Sampling, find_way
from paceline.job.alerts import AlertsSpec
from paceline.launch.alarms import LOOK_EVERY_S, Alarms, Reader
from paceline.launch.default_alerts import alerts
from paceline.record.follow import RunFollower
from paceline.record.metrics import StepMetrics, read_metrics
from paceline.record.samples import Sampler

STEP_S = 0.1
"""The step that the cost is a share of."""

REPEATS, INNER = 30, 200
JOB = {
    "name": "cost",
    "model": {"decoder": {"layers": 4, "hidden": 192, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 128, "held_out": 0.01},
    "cluster": {"accelerator": "cpu", "per_node": 2},
    "train": {"global_batch": 16, "learning_rate": 0.001, "precision": "fp32"},
    "checkpoint": {"every": 1_000_000},
    "evaluate": {"every": 1_000_000, "samples": 8},
}


def main() -> None:
    options = _parse()
    if options.beside is not None:
        _switch(options.beside, options.window)
        return
    print(machine())
    _show_samples()
    if options.steps:
        _show_run(options.steps, options.window)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of the run; 0 is no run")
    parser.add_argument("--window", type=int, default=20, help="steps of a turn")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _show_samples() -> None:
    judge, sampler = Rules(list(alerts(None))), Sampler(usd_per_h=1.0)
    line = StepMetrics(
        step=1,
        generation=1,
        at=1.0,
        loss=2.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens_per_s=1000.0,
        step_s=STEP_S,
        forward_s=0.03,
        backward_s=0.05,
        vote_s=0.01,
        apply_s=0.01,
        memory_bytes=1 << 30,
        applied=True,
        samples_digest="",
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reader, host, ask = Reader(folder, usd_per_h=1.0), Host(folder), find_way()

        def step() -> None:
            for sample in sampler.of_step(line, 1.0):
                for _ in judge.take(sample):
                    pass

        _show("a step's line", step, STEP_S)
        _show("a look without news", lambda: list(reader.look(1.0)), LOOK_EVERY_S)
        _show("a sample of the host", lambda: host.sample(0, []), EVERY_S)
        _show(f"a sample of {len(ask())} GPUs", ask, EVERY_S)


def _show(what: str, call: Callable[[], object], every_s: float) -> None:
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(INNER):
            call()
        took.append((time.perf_counter() - began) / INNER)
    share = statistics.median(took) / every_s
    told = spread([1e6 * each for each in took], "us", 1)
    print(f"{what:22} {told}; {share:.4%} of the {every_s:g} s between two", flush=True)


def _show_run(steps: int, window: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = JOB | {"train": {**JOB["train"], "steps": steps}}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--no-report"]
        running = subprocess.Popen(
            [*command, "--out", "run"], cwd=folder, stdout=subprocess.DEVNULL
        )
        beside = [sys.executable, __file__, "--beside", str(folder / "run")]
        switching = subprocess.Popen([*beside, "--window", str(window)], stdout=subprocess.PIPE)
        running.wait()
        (folder / "over").touch()
        switched = json.loads(switching.communicate()[0])
        lines = read_metrics(folder / "run" / "metrics.jsonl")
    durations = {line.step: line.step_s for line in lines}
    pairs = []
    for begin in switched:
        on = [durations[step] for step in range(begin, begin + window) if step in durations]
        off = [durations[step] for step in range(begin - window, begin) if step in durations]
        if len(on) == len(off) == window:
            pairs.append((statistics.median(on), statistics.median(off)))
    ratio, low, high = interval(pairs, ratio_of_medians)
    print(f"steps without          {spread([1e3 * off for _, off in pairs], 'ms', 1)}")
    print(f"steps with all of it   {ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})")


def _switch(run: Path, window: int) -> None:
    """Watch the run in every second turn; prints the first step of each of those."""
    switched: list[int] = []
    alarms: Alarms | None = None
    sampling: Sampling | None = None
    other, follower, step = tempfile.mkdtemp(), RunFollower(run), 0
    while not (run.parent / "over").exists():
        time.sleep(0.02)
        step = max([step, *(line.step for line in follower.look().metrics)])
        is_on = step // window % 2 == 1
        if is_on and alarms is None:
            switched.append(step // window * window)
            alarms = Alarms(run, "cost", AlertsSpec(), None, lambda event: None)
            sampling = Sampling(Path(other), 0, has_gpus=True)
            alarms.start()
            sampling.start()
        elif not is_on and alarms is not None and sampling is not None:
            alarms.close()
            sampling.close()
            alarms = sampling = None
    print(json.dumps(switched))


if __name__ == "__main__":
    main()
