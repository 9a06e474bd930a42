"""What sinks cost: a call of each, and the steps of a run beside them.

    .venv/bin/python benchmarks/sink_cost.py                  all of it, about 6 minutes
    .venv/bin/python benchmarks/sink_cost.py --steps 0        without the run

Calls: seconds to open each sink, and of one step with ten numbers, in the sink's own process: the
clock of the call and processor time with its flushes. W&B (offline) and MLflow (a database in a
temporary folder) only where they are installed. Run: two real ranks over gloo, with TensorBoard and
Prometheus beside them. Both sinks are stopped and continued (SIGSTOP, SIGCONT) in turns of
`--window` steps. Each turn with them is compared with the one before, without; as they also send
what they missed meanwhile, it is the cost of twice the steps.
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
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import yaml
from alerts_cost import JOB
from figures import interval, machine, ratio_of_medians, spread

from paceline.job import MetricsSpec
from paceline.launch.sinks import SINKS, Told, opener
from paceline.launch.sinks.beside import sinks_beside
from paceline.record.follow import RunFollower
from paceline.record.metric_names import FIELDS
from paceline.record.metrics import read_metrics

CALLS, FLUSH_EVERY = 2000, 20
"""A flush is every 2 s: 20 steps of 100 ms."""

VALUES = dict.fromkeys(list(FIELDS.values())[:10], 1.5)
BESIDE = ("tensorboard", "prometheus")


def main() -> None:
    options = _parse()
    if options.beside is not None:
        _switch(options.beside, options.window)
        return
    print(machine(), flush=True)
    for name in SINKS:
        _show_calls(name)
    if options.steps:
        _show_run(options.steps, options.window)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of the run; 0 is no run")
    parser.add_argument("--window", type=int, default=20, help="steps of a turn")
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
    durations = {line.step: line.step_s for line in lines if line.step_s is not None}
    pairs = []
    for begin in switched:
        on = [durations[step] for step in range(begin, begin + window) if step in durations]
        off = [durations[step] for step in range(begin - window, begin) if step in durations]
        if len(on) == len(off) == window:
            pairs.append((statistics.median(on), statistics.median(off)))
    ratio, low, high = interval(pairs, ratio_of_medians)
    print(f"steps without          {spread([1e3 * off for _, off in pairs], 'ms', 1)}")
    print(
        f"steps with {' and '.join(BESIDE)}: {ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%})"
    )


def _switch(run: Path, window: int) -> None:
    """Sinks beside the run in every second turn; prints the first step of each of those."""
    switched: list[int] = []
    follower, step, was_on = RunFollower(run), 0, True
    while not (run / "metrics.jsonl").exists():
        time.sleep(0.1)
    with sinks_beside(run, MetricsSpec(sinks=list(BESIDE)), lambda note: None):
        while not (run.parent / "over").exists():
            time.sleep(0.02)
            step = max([step, *(line.step for line in follower.look().metrics)])
            is_on = step // window % 2 == 1
            if is_on == was_on:
                continue
            found = _sinks_of(run)
            if len(found) < len(BESIDE):
                continue
            if is_on:
                switched.append(step // window * window)
            for pid in found:
                os.kill(pid, signal.SIGCONT if is_on else signal.SIGSTOP)
            was_on = is_on
        for pid in _sinks_of(run):
            os.kill(pid, signal.SIGCONT)
    print(json.dumps(switched))


def _sinks_of(run: Path) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"paceline.launch.sinks.feed" in words and str(run).encode() in words:
            found.append(int(file.parent.name))
    return found


if __name__ == "__main__":
    main()
