"""A job to run whole, and what its record says afterwards."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.command import run_command

from paceline.record import events as log
from paceline.record.metrics import StepMetrics, read_all_metrics, read_metrics

JOB: dict[str, Any] = {
    "name": "test",
    "model": {"decoder": {"layers": 2, "hidden": 32, "heads": 2}},
    "data": {"path": "text", "seq_len": 32},
    "cluster": {"accelerator": "cpu", "nodes": 1, "per_node": 2},
    "train": {
        "global_batch": 8,
        "steps": 12,
        "learning_rate": 0.003,
        "warmup_steps": 2,
        "precision": "fp32",
    },
    "checkpoint": {"every": 4, "keep_last": 2},
    "evaluate": {"every": 6, "samples": 8},
}
"""Small enough that a run takes a few seconds, most of them imports."""


def use_double(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Every worker started from here on computes on the double of NCCL (`tests/sim`).

    Args:
        settings: `LATE="wait 5"` is NCCL_DOUBLE_LATE in their environment.
    """
    root = Path(__file__).parents[2]
    paths = (str(root), str(root / "src"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PACELINE_FORK_SERVER", "tests.sim.fork_server")
    for name, value in settings.items():
        monkeypatch.setenv(f"NCCL_DOUBLE_{name}", value)


@dataclass
class Scene:
    """A folder with text and a job file, and commands run in it."""

    folder: Path
    job: dict[str, Any] = field(default_factory=lambda: yaml.safe_load(yaml.safe_dump(JOB)))

    def __post_init__(self) -> None:
        text = self.folder / "text"
        text.mkdir(parents=True, exist_ok=True)
        words = random.Random(5)
        for number in range(6):
            line = " ".join(words.choices(["pace", "line", "rider", "wind", "gap"], k=12))
            (text / f"{number}.txt").write_text(f"{line}\n" * 40)
        self.write_job()

    def write_job(self) -> None:
        (self.folder / "job.yaml").write_text(yaml.safe_dump(self.job))

    def paceline(self, *arguments: str, timeout: float = 600) -> "subprocess.CompletedProcess[str]":
        """Run the command to its end, whatever its exit code."""
        return run_command(*arguments, folder=self.folder, timeout=timeout)

    def run(self, out: str, *arguments: str, code: int = 0) -> "Record":
        """`paceline run job.yaml --out OUT`, and what it left; the page alone is not written."""
        done = self.paceline("run", "job.yaml", "--no-report", "--out", out, *arguments)
        assert done.returncode == code, done.stdout + done.stderr + self.logs(out)
        return self.record(out, done.stdout + done.stderr)

    def resume(self, out: str, *arguments: str, code: int = 0) -> "Record":
        done = self.paceline("run", "--no-report", "--resume", out, *arguments)
        assert done.returncode == code, done.stdout + done.stderr + self.logs(out)
        return self.record(out, done.stdout + done.stderr)

    def start(self, out: str, *arguments: str) -> "subprocess.Popen[str]":
        """The same in the background, as a terminal would start it."""
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", "job.yaml", "--out", out, *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def record(self, out: str, output: str = "") -> "Record":
        return Record(self.folder / out, output)

    def logs(self, out: str) -> str:
        return text_of_logs(self.folder / out)


def text_of_logs(run: Path) -> str:
    found = sorted((run / "logs").glob("*.log"))
    return "".join(f"\n== {path.name}\n{path.read_text()}" for path in found)


@dataclass
class Record:
    """What a run left in its folder, and what it printed."""

    folder: Path
    output: str

    @property
    def events(self) -> list[log.AnyEvent]:
        return log.read_events(self.folder / "events.jsonl")

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def finished(self) -> log.RunFinished:
        finished: log.RunFinished = self.of(log.RunFinished)[-1]
        return finished

    @property
    def story(self) -> str:
        """All that is left to say why a test failed."""
        return (self.folder / "events.jsonl").read_text() + text_of_logs(self.folder)

    @property
    def digest(self) -> str | None:
        return self.finished.state_digest

    @property
    def metrics(self) -> list[StepMetrics]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def all_metrics(self) -> list[StepMetrics]:
        return read_all_metrics(self.folder / "metrics.jsonl")

    @property
    def samples(self) -> list[tuple[int, str]]:
        """The ledger: every step's sample ids, as their digest."""
        return [(line.step, line.samples_digest) for line in self.metrics]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())


def assert_same_end(run: Record, clean: Record) -> None:
    """Equal to the bit, and every sample consumed exactly once."""
    assert run.finished.outcome == "finished", run.story
    assert run.digest == clean.digest
    assert run.samples == clean.samples
    assert run.metrics[-1].loss == clean.metrics[-1].loss


def wait_until(condition: Callable[[], Any], *, what: str, timeout_s: float = 600) -> Any:
    """The first truthy answer; polling, since the other side is another process."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.01)
    raise AssertionError(f"waited {timeout_s:.0f} s for {what}")


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def agent_of(worker: int) -> int:
    """Process id of a worker's agent, by the worker's: the fork server that forked it is
    between."""
    return _parent(_parent(worker))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])
