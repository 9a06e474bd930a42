"""The MLflow sink against MLflow's own server, read back by MLflow's own client."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.launch.test_sinks import append, evaluation, step

from paceline.launch.sinks.feed import read_mark

ROOT = Path(__file__).parents[2]
READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
place = client.get_experiment_by_name("paceline").experiment_id
runs = client.search_runs([place])
(run,) = runs
history = {
    name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
    for name in run.data.metrics
}
print(json.dumps({"name": run.info.run_name, "status": run.info.status,
                  "params": run.data.params, "history": history}))
"""
SCRIPT = """
import time
for step in range(1, 9):
    began = time.perf_counter()
    time.sleep(0.25)
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    with open("times.txt", "a") as file:
        file.write(f"{time.perf_counter() - began}\\n")
"""
USER = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "of-a-test-1234"}
SERVER = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # processes that would outlive the server
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-a-test",
    "MLFLOW_AUTH_ADMIN_PASSWORD": USER["MLFLOW_TRACKING_PASSWORD"],
}


class Server:
    """`mlflow server` over a database in a folder."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def up(self, *words: str) -> None:
        """Start it, and wait until it answers."""
        folder = self.folder
        folder.mkdir(exist_ok=True)
        with (folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self.python, "-m", "mlflow", "server", "--host", "127.0.0.1"),
                    *("--port", str(self.port), "--workers", "1", *words),
                    *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db"),
                    *("--artifacts-destination", str(folder / "artifacts")),
                ],
                cwd=folder,
                env=os.environ | SERVER,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(600):
            try:
                direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                direct.open(f"{self.uri}/health", timeout=2).close()
                return
            except OSError:
                assert self._process.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.2)
        pytest.fail("the server does not answer: " + (folder / "server.log").read_text())

    def down(self) -> None:
        """At once, as a machine that loses its power."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def read(self) -> dict[str, Any]:
        """What its one run has."""
        done = subprocess.run(
            [self.python, "-c", READ, self.uri],
            env=os.environ | USER,
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture
def server(python_with: Callable[..., Path], tmp_path: Path) -> Iterator[Server]:
    made = Server(python_with("mlflow"), tmp_path / "server")
    yield made
    made.down()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "run.json").write_text('{"name": "tiny", "created_at": 1.5}')
    (folder / "job.yaml").write_text("train: {steps: 9, optimizer: adamw}\n")
    return folder


@contextmanager
def sink(server: Server, run: Path, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """The sink's own process; leaving this says that the run is over."""
    settings = {"mlflow": {"uri": server.uri, "experiment": "paceline"}, "every": 1}
    process = subprocess.Popen(
        [
            *(server.python, "-m", "paceline.launch.sinks.supervisor", str(run)),
            json.dumps(settings | {"wanted": ["mlflow"]}),
        ],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src"} | variables,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)


def wait_until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def log_of(run: Path) -> str:
    path = run / "logs" / "sink-mlflow.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.engine("mlflow", ran="numbers, parameters and a resumed run, by MLflow's server")
def test_s0_21_mlflows_server_has_every_step_once_and_a_resume_goes_to_the_same_run(server, run):
    server.up()
    append(run, "metrics.jsonl", *(step(number) for number in (1, 2, 3)))
    append(run, "events.jsonl", evaluation(2, 8.0))
    with sink(server, run):
        pass
    # Killed after step 3 and resumed from step 2: step 3 is repeated.
    append(run, "metrics.jsonl", *(step(number, generation=2) for number in (3, 4)))
    with sink(server, run):
        pass
    found = server.read()
    assert (found["name"], found["status"]) == ("run", "FINISHED")
    assert found["params"]["train.optimizer"] == "adamw"
    assert found["history"]["train/loss"] == [[1, 1.0], [2, 2.0], [3, 3.0], [4, 4.0]]
    assert found["history"]["eval/loss"] == [[2, 8.0]]


@pytest.mark.engine("mlflow", ran="a server that dies in the middle and comes back")
def test_s0_21_what_a_dead_mlflow_server_missed_is_sent_when_it_is_back(server, run):
    server.up()
    append(run, "metrics.jsonl", step(1))
    with sink(server, run):
        wait_until(lambda: "experiment paceline" in log_of(run))
        server.down()
        append(run, "metrics.jsonl", step(2), step(3))
        time.sleep(4.0)  # longer than the pause between two flushes: one falls into the gap
        server.up()
        # MLflow's client waits up to a minute between two tries, a sink's last moment is shorter.
        wait_until(lambda: (mark := read_mark(run, "mlflow")) is not None and mark.step == 3, 300)
    assert server.read()["history"]["train/loss"] == [[1, 1.0], [2, 2.0], [3, 3.0]]


@pytest.mark.engine("mlflow", ran="credentials refused by a server with basic-auth")
def test_s0_21_refused_credentials_of_mlflow_are_told_once_and_not_tried_again(
    python_with, server, run
):
    python_with("mlflow", "flask-wtf")
    server.up("--app-name", "basic-auth")
    append(run, "metrics.jsonl", step(1))
    wrong = USER | {"MLFLOW_TRACKING_PASSWORD": "wrong-one-1234"}
    with sink(server, run, **wrong) as process:
        process.wait(60)  # by itself, although the run is not over
    log = log_of(run)
    assert log.count("--- start") == log.count("refused: UNAUTHENTICATED") == 1
    assert "Traceback" not in log
    assert "wrong-one-1234" not in log
    with sink(server, run, **USER):
        pass
    assert server.read()["history"]["train/loss"] == [[1, 1.0]]


@pytest.mark.engine("mlflow", ran="a run whose server is down")
def test_s0_21_a_run_whose_mlflow_server_is_down_trains_as_without(server, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [
            *(server.python, "-m", "paceline", "run", "--script", "train.py", "--set", "name=down"),
            *("--set", "metrics.sinks=[mlflow]", "--set", f"metrics.mlflow.uri={server.uri}"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    times = sorted(map(float, (tmp_path / "times.txt").read_text().split()))
    assert len(times) == 8
    assert times[4] < 0.5  # the median of steps that take 0.25 s
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert said.count("MLflow has 0 of ") == 1
