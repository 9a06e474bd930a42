"""Run a job with faults and without, each as a whole `paceline run` in a process of its own.

Its own process, because some faults are the controller's; and so that whatever is left of a run
after its end can be told from what is ours.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import paceline
from paceline.errors import JobError, Problem, RunError
from paceline.job import Job, dump_job
from paceline.job.fault_grammar import parse_fault
from paceline.launch.on_node import marked
from paceline.plan import Plan
from paceline.prepare import TrainedOn
from paceline.record import events as log
from paceline.record.metrics import StepMetrics, read_all_metrics
from paceline.record.ownership import is_held
from paceline.record.run import RunFolder, create_run, open_run
from paceline.record.snapshot_files import FOLDER, remove_snapshots

_MARK = "PACELINE_DRILL"
"""Environment variable by which every process of a run is known, whatever became of its parent."""

_LOOK_S = 0.1
_END_S = 5.0
"""How long what is left of a run may take to go after it; a guess, ten times what it takes."""

_HELD = JobError.exit_code
"""What starting a run again ends with while what is left of it still holds its lock."""

OnEvent = Callable[[log.AnyEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run that has ended."""

    run: RunFolder
    events: list[log.AnyEvent]
    lines: list[StepMetrics]
    left_behind: tuple[str, ...]
    seconds: float

    @property
    def digest(self) -> str | None:
        ends = [event for event in self.events if isinstance(event, log.RunFinished)]
        return ends[-1].state_digest if ends else None

    @property
    def digests(self) -> dict[int, str]:
        """By step, where `drill.digest_every` asked for them."""
        return {line.step: line.state_digest for line in self.lines if line.state_digest}


def run_reference(
    job: Job, plan: Plan, runs: Path, data: TrainedOn | None, *, on_event: OnEvent, limit_s: float
) -> Ran:
    """The job undisturbed. Done once: the same job on the same versions is taken from the registry.

    Raises:
        RunError: `R060`, it did not finish.
    """
    calm = replace(job, spec=replace(job.spec, drill=replace(job.spec.drill, kill=[], faults=[])))
    folder = runs / f"drill-reference-{_key(calm)}"
    if (folder / "run.json").exists():
        known = _read(open_run(folder))
        if known.digest is not None:
            return known
        folder = runs / f"{folder.name}-{int(time.time())}"
    run = create_run(calm, plan, folder=folder, runs=runs, data=data)
    ran = run_to_end(run, on_event=on_event, limit_s=limit_s)
    if ran.digest is None:
        raise RunError.of(
            code="R060",
            what="the undisturbed run did not finish, so there is nothing to compare with",
            where=str(run.path),
            fix=f"see `paceline run --resume {run.path}` and its logs",
        )
    return ran


def read_run(folder: Path) -> Ran:
    return _read(open_run(folder))


def run_to_end(
    run: RunFolder,
    *,
    on_event: OnEvent = lambda event: None,
    on_look: Callable[[], None] = lambda: None,
    limit_s: float = 3600.0,
) -> Ran:
    """Run it, start it again when a fault ended its controller, and see what it leaves behind.

    Args:
        on_look: Called ten times a second; what it raises ends the run.
    """
    began, told = time.monotonic(), 0
    token = hashlib.sha256(f"{run.path} {began} {os.getpid()}".encode()).hexdigest()[:16]
    starts = 0
    while True:
        process = _start(run, token)
        starts += 1
        try:
            while process.poll() is None and time.monotonic() - began < limit_s:
                time.sleep(_LOOK_S)
                told = _tell(run, told, on_event)
                on_look()
        except BaseException:  # whoever stops the drill stops its run
            _stop(process, token)
            raise
        if process.poll() is None:
            process.kill()
        process.wait()
        told = _tell(run, told, on_event)
        events = log.read_events(run.events_file)
        if time.monotonic() - began >= limit_s:
            break
        if process.returncode == _HELD and starts > 1:  # what is left of the last one is ending
            starts -= 1
        elif not _starts_again(events, starts):
            break
    left = tuple(_left_behind(run, token))
    return _read(run, left, time.monotonic() - began)


def _key(job: Job) -> str:
    """A key of everything that the end of an undisturbed run depends on."""
    import importlib.metadata

    parts = [dump_job(job.spec), str(job.folder), paceline.__version__]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        parts.append(importlib.metadata.version("torch"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _start(run: RunFolder, token: str) -> "subprocess.Popen[bytes]":
    with (run.logs / "drill.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", "--resume", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, _MARK: token},
            start_new_session=True,
        )


def _stop(process: "subprocess.Popen[bytes]", token: str) -> None:
    """End a run at once: asked twice it waits for no step, and what is left then is killed."""
    try:
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            time.sleep(_LOOK_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_S)
    finally:  # also when whoever stops the drill does not want to wait
        for pid in marked(token, name=_MARK):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _tell(run: RunFolder, told: int, on_event: OnEvent) -> int:
    events = log.read_events(run.events_file)
    for event in events[told:]:
        on_event(event)
    return len(events)


def _starts_again(events: list[log.AnyEvent], starts: int) -> bool:
    """Whether the run ended because a fault ended its controller, and not for good."""
    ended = sum(
        isinstance(event, log.FaultInjected) and parse_fault(event.fault).row.end == "relaunches"
        for event in events
    )
    over = [event for event in events if isinstance(event, log.RunFinished | log.RunStarted)]
    last = over[-1] if over else None
    is_over = isinstance(last, log.RunFinished) and last.outcome in ("finished", "failed")
    return ended >= starts and not is_over


def _read(run: RunFolder, left: tuple[str, ...] = (), seconds: float = 0.0) -> Ran:
    return Ran(
        run=run,
        events=log.read_events(run.events_file),
        lines=read_all_metrics(run.metrics_file),
        left_behind=left,
        seconds=seconds,
    )


def _left_behind(run: RunFolder, token: str) -> Iterator[str]:
    """What is still there of a run that has ended. What is found is taken away."""
    deadline = time.monotonic() + _END_S
    while (pids := marked(token, name=_MARK)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for pid in pids:
        yield f"process {pid}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    if is_held(run.path):
        yield "the run's lock"
    files = remove_snapshots(FOLDER, run.path) if FOLDER.is_dir() else 0
    if files:
        yield f"{files} files in {FOLDER}"
    yield from (f"checkpoints/{path.name}" for path in sorted(run.checkpoints.glob("*.tmp")))


def check_faults(job: Job, plan: Plan) -> Iterator[Problem]:
    num_ranks, steps = plan.cluster.num_ranks, job.spec.train.steps
    saves = [plan.checkpoint_every]
    if job.spec.evaluate.outputs_every is not None:
        saves.append(job.spec.evaluate.outputs_every)
    for text in job.spec.drill.all_faults:
        fault = parse_fault(text)
        if max(fault.ranks, default=0) >= num_ranks:
            what = f"{text}: the ranks are 0 to {num_ranks - 1}"
        elif fault.sample is None and not 1 <= fault.step <= steps:
            what = f"{text}: the steps are 1 to {steps}"
        elif fault.phase == "save" and all(fault.step % every for every in (*saves, steps)):
            what = f"{text}: a checkpoint is saved every {' and '.join(map(str, saves))} steps"
        else:
            continue
        yield Problem(
            code="R061",
            what=what,
            where="--fault, or drill.faults",
            fix="change rank or step, or raise train.steps; "
            "`paceline drill --list` shows every kind",
        )
