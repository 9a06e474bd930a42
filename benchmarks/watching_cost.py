"""What watching costs a run: sinks, alerts, samples of the machine and the live page.

    .venv/bin/python benchmarks/watching_cost.py                  all of it, about 8 minutes
    .venv/bin/python benchmarks/watching_cost.py --steps 0        without the run

Calls: seconds to open each sink, and of one step with ten numbers, in the sink's own process: the
clock of the call and processor time with its flushes. W&B (offline) and MLflow (a database in a
temporary folder) only where they are installed. Of alerts and samples: a step's line through the
built-in rules, a look at a run's folder without news, one sample of this machine; each also as a
share of the time between two of them.

Run: real ranks over gloo, one thread each; with `--ranks 1` a core of two is left for the rest.
Beside it are TensorBoard and Prometheus, a second watch over alerts and a second sampler like those
that the run has anyway, and a live page with one reader. All of it is stopped and continued in
turns of `--window` steps, by a process of their own, and each turn with it is compared with the one
before, without. Sinks and page also catch up on what they missed, so it is the cost of twice the
steps. `processor` is what the sinks and the page's server used, over the steps of the turns with
them.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml
from figures import interval, machine, ratio_of_medians, spread

from paceline.control.alerts import Rules
from paceline.control.sampling import EVERY_S, Host, Sampling, find_way
from paceline.job import MetricsSpec
from paceline.job.alerts import AlertsSpec
from paceline.launch.default_alerts import alerts
from paceline.launch.judge_alerts import LOOK_EVERY_S, Alarms, Reader
from paceline.launch.sinks import SINKS, Told, opener
from paceline.launch.sinks.run_sinks import sinks_beside
from paceline.record.follow import RunFollower
from paceline.record.metric_names import FIELDS
from paceline.record.metrics import StepMetrics, read_metrics
from paceline.record.samples import Sampler

CALLS, FLUSH_EVERY = 2000, 20
"""A flush is every 2 s: 20 steps of 100 ms."""

VALUES = dict.fromkeys(list(FIELDS.values())[:10], 1.5)
BESIDE = ("tensorboard", "prometheus")

STEP_S = 0.1
"""The step that the cost is a share of."""

REPEATS, INNER = 30, 200
JOB = {
    "name": "cost",
    "model": {"decoder": {"layers": 4, "hidden": 192, "heads": 4}},
    "data": {"corpus": "python-stdlib", "seq_len": 128, "held_out": 0.01},
    "train": {"global_batch": 8, "learning_rate": 0.001, "precision": "fp32"},
    "checkpoint": {"every": 1_000_000},
    "evaluate": {"every": 1_000_000, "samples": 8},
}


def main() -> None:
    options = _parse()
    if options.beside is not None:
        _switch(options.beside, options.window)
        return
    print(machine(), flush=True)
    for name in SINKS:
        _show_calls(name)
    _show_samples()
    if options.steps:
        _show_run(options.steps, options.window, options.ranks)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of the run; 0 is no run")
    parser.add_argument("--window", type=int, default=10, help="steps of a turn")
    parser.add_argument("--ranks", type=int, default=2, help="of the run, one thread each")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _show_calls(name: str) -> None:
    package = SINKS[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        print(f"{name:12} not measured: {package} is not installed", flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, server = Path(temporary), HTTPServer(("127.0.0.1", 0), _Collector)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {
            "wandb": {"project": "cost", "entity": None, "mode": "offline"},
            "mlflow": {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "cost"},
            "prometheus": {"host": "127.0.0.1", "port": "auto"},
            "otel": {"endpoint": f"http://127.0.0.1:{server.server_port}"},
        }
        told = Told(run=folder, id="0123", settings=settings.get(name, {}), job={})
        began, took = time.perf_counter(), []
        with opener(name)(told) as sink:
            opened_s = time.perf_counter() - began
            sink.begin(0)
            used_s = time.process_time()
            for step in range(1, CALLS + 1):
                called = time.perf_counter()
                sink.write(step, time.time(), VALUES)
                took.append(1e6 * (time.perf_counter() - called))
                if step % FLUSH_EVERY == 0:
                    sink.flush()
            used_us = 1e6 * (time.process_time() - used_s) / CALLS
        server.shutdown()
    print(f"{name:12} open {opened_s:.2f} s; a step {spread(took, 'us', 0)}")
    print(
        f"{'':12} p99 {sorted(took)[int(0.99 * CALLS)]:.0f} us, processor {used_us:.0f} us",
        flush=True,
    )


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


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

        _show_share("a step's line", step, STEP_S)
        _show_share("a look without news", lambda: list(reader.look(1.0)), LOOK_EVERY_S)
        _show_share("a sample of the host", lambda: host.sample(0, []), EVERY_S)
        _show_share(f"a sample of {len(ask())} GPUs", ask, EVERY_S)


def _show_share(what: str, call: Callable[[], object], every_s: float) -> None:
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(INNER):
            call()
        took.append((time.perf_counter() - began) / INNER)
    share = statistics.median(took) / every_s
    told = spread([1e6 * each for each in took], "us", 1)
    print(f"{what:22} {told}; {share:.4%} of the {every_s:g} s between two", flush=True)


def _show_run(steps: int, window: int, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = {"accelerator": "cpu", "per_node": ranks}
        job = JOB | {"train": {**JOB["train"], "steps": steps}, "cluster": cluster}
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--no-report"]
        running = subprocess.Popen(
            [*command, "--out", "run"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        beside = [sys.executable, __file__, "--beside", str(folder / "run")]
        switching = subprocess.Popen([*beside, "--window", str(window)], stdout=subprocess.PIPE)
        running.wait()
        (folder / "over").touch()
        switched = json.loads(switching.communicate()[0])
        lines = read_metrics(folder / "run" / "metrics.jsonl")
    durations = {line.step: line.step_s for line in lines if line.step_s is not None}
    pairs = []
    for begin in switched["steps"]:
        on = [durations[step] for step in range(begin, begin + window) if step in durations]
        off = [durations[step] for step in range(begin - window, begin) if step in durations]
        if len(on) == len(off) == window:
            pairs.append((statistics.median(on), statistics.median(off)))
    ratio, low, high = interval(pairs, ratio_of_medians)
    print(f"steps without          {spread([1e3 * off for _, off in pairs], 'ms', 1)}")
    print(f"steps with all of it   {ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})")
    for name, seconds in switched["processor_s"].items():
        a_step = seconds / (len(switched["steps"]) * window)
        print(f"processor {name:12} {1e3 * a_step:.2f} ms a step, {a_step / STEP_S:.2%} of 100 ms")


def _switch(run: Path, window: int) -> None:
    """All of it beside the run in every second turn; prints the first step of each of those."""
    switched: list[int] = []
    follower, step, other = RunFollower(run), 0, tempfile.mkdtemp()
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.1)
    page = _Page(run)
    watch: tuple[Alarms, Sampling] | None = None
    with sinks_beside(run, MetricsSpec(sinks=list(BESIDE)), lambda note: None):
        while len(_sinks_of(run)) < len(BESIDE):
            time.sleep(0.1)
        pids = {**_sinks_of(run), "page": page.pid}
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        before = {name: _processor_s(pid) for name, pid in pids.items()}
        used = before
        while not (run.parent / "over").exists():
            time.sleep(0.02)
            step = max([step, *(line.step for line in follower.look().metrics)])
            used = {name: _processor_s(pid) for name, pid in pids.items()}
            is_on = step // window % 2 == 1
            if is_on == (watch is not None):
                continue
            for pid in pids.values():
                os.kill(pid, signal.SIGCONT if is_on else signal.SIGSTOP)
            if watch is None:
                switched.append(step // window * window)
                watch = (
                    Alarms(run, "cost", AlertsSpec(), None, lambda event: None),
                    Sampling(Path(other), 0, has_gpus=True),
                )
                for each in watch:
                    each.start()
            else:
                for each in watch:
                    each.close()
                watch = None
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
    page.close()
    took = {name: used[name] - before[name] for name in pids}
    print(json.dumps({"steps": switched, "processor_s": took}))


class _Page:
    """`paceline watch` of a run, and somebody who looks at it."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "paceline", "watch", str(run), "--port", "0"]
        self._serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._serving.stderr is not None
        address = self._serving.stderr.readline().split()[-1].partition("#")[0]
        base, _, token = address.partition("?")
        self._reader = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        self._reader.open(address).read()
        stream = self._reader.open(f"{base}api/live?runs={run.name}&{token}")
        threading.Thread(target=lambda: list(stream), daemon=True).start()

    @property
    def pid(self) -> int:
        return self._serving.pid

    def close(self) -> None:
        self._serving.kill()
        self._serving.wait()


def _processor_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _sinks_of(run: Path) -> dict[str, int]:
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"paceline.launch.sinks.feed" in words and str(run).encode() in words:
            name = next(each for each in BESIDE if each.encode() in words)
            found[name] = int(file.parent.name)
    return found


if __name__ == "__main__":
    main()
