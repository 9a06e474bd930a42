"""Run a job on this machine: one agent process for each node of the plan."""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import paceline
from paceline.control.agent import TOKEN_VARIABLE
from paceline.control.controller import AgentAddress, Controller, Progress
from paceline.control.journal import Journal
from paceline.control.state import Setup, State
from paceline.control.succession import Memory, replay, snapshot
from paceline.errors import JobError, Problem
from paceline.launch.front import Force, supervise
from paceline.parallel import reasons_ours_cannot
from paceline.parallel.rank_map import peers_of
from paceline.parallel.shrink import rounding_bound
from paceline.plan import Plan
from paceline.profile import check_runnable, needs_transformers
from paceline.record.events import (
    AnyEvent,
    BatchSkipped,
    EventLog,
    ExactnessChanged,
    FaultInjected,
    RunFinished,
    RunStarted,
    read_events,
)
from paceline.record.holding import (
    InCharge,
    claim_control,
    claim_from_another,
    find_controller,
    hold_agents,
    hold_alone,
    is_held,
    publish_controller,
)
from paceline.record.run import RunFolder, check_steps_left, write_resolved
from paceline.record.snapshot_files import FOLDER, remove_snapshots
from paceline.spec import Job, dump_job

_UNIT_ROUNDOFF = {
    "fp32": 2.0**-24,
    "tf32": 2.0**-11,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 2.0**-4,
}
"""Of the matrix multiplications. Source: IEEE 754 and the formats' definitions; fp8 is E4M3."""

_PATIENCE_S = 5.0
"""How long to wait for what is left of the run's last controller. A guess: a step and a save."""


def check_can_run(job: Job, plan: Plan) -> Iterator[Problem]:
    """What keeps this machine from running the job, before anything is started."""
    if importlib.util.find_spec("torch") is None:
        yield Problem(
            code="R010",
            what="training needs PyTorch, which is not installed",
            where=sys.prefix,
            fix="pip install torch numpy",
        )
    if job.spec.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield Problem(
            code="R010",
            what="TensorBoard was asked for, which is not installed",
            where=job.where("metrics.tensorboard"),
            fix="pip install tensorboard, or set metrics.tensorboard to false",
        )
    against = list(check_runnable(job))
    yield from against
    of_transformers = not against and job.spec.program is None and needs_transformers(job)
    if of_transformers and importlib.util.find_spec("transformers") is None:
        yield Problem(
            code="R010",
            what="this model is built by transformers, which is not installed",
            where=job.where("model"),
            fix="pip install transformers",
        )
    yield from check_runs_here(job, plan)
    if not plan.cluster.is_local:
        yield Problem(
            code="R011",
            what=f"the job asks for {plan.cluster.num_nodes} node(s) of "
            f"{plan.cluster.ranks_per_node} {plan.cluster.accelerator}, which this machine is not",
            where=job.where("cluster"),
            fix="leave cluster out to run on this machine, or set cluster.accelerator to cpu; "
            "`paceline plan` works for any cluster",
        )
    port = job.spec.cluster.rendezvous_port
    if port != "auto" and not _is_free(port):
        yield Problem(
            code="R012",
            what=f"port {port} is in use on 127.0.0.1",
            where=job.where("cluster.rendezvous_port"),
            fix="leave it out to take a free port, or end the program that holds it",
        )


def check_runs_here(job: Job, plan: Plan) -> Iterator[Problem]:
    """What was planned and Paceline's own runtime cannot do yet."""
    lacking = list(reasons_ours_cannot(plan.layout))
    if plan.engine != "paceline":
        lacking.append(f"engine {plan.engine}")
    if lacking:
        yield Problem(
            code="R015",
            what=f"`paceline run` cannot do this plan yet: {', '.join(lacking)}",
            where=job.where("layout"),
            fix="leave what is named at auto, and engine out; `paceline plan` works for all of it",
        )


def run_local(
    job: Job,
    plan: Plan,
    run: RunFolder,
    *,
    on_event: Callable[[AnyEvent], None] = lambda event: None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> State:
    """Run a job to its end, and say how it ended.

    Args:
        job: The resolved job; it and the plan are written into the run's folder, where every
            process reads them.
        plan: Its plan.
        run: The run's folder, new or of a run to go on with.
        on_event: Told of every event after it is in the log.
        on_progress: Told of everything a worker says.
        on_note: Told of what is done about a controller that does not answer.

    Raises:
        KeyboardInterrupt: Asked to stop twice while the controller did not answer.
        JobError: The machine cannot run it, another process runs it already, or has finished it
            meanwhile.
    """
    problems = list(check_can_run(job, plan))
    if problems:
        raise JobError(*problems)
    with claim_from_another(
        run.path, patience_s=_PATIENCE_S, is_over=lambda since_s: _is_over(run, since_s)
    ):
        lock, takes_over = _hold(job, run)
        if not takes_over:
            check_steps_left(run, job, meanwhile=True)
        with lock, _listen(run) as listener:
            post = _Post(job, plan, run, lock, listener)
            force = Force(
                lease_s=job.spec.recovery.lease, end_agents=lambda: _end_agents_by_force(run)
            )
            return supervise(
                post.serve,
                takes_over=takes_over,
                on_event=on_event,
                on_progress=on_progress,
                on_note=on_note,
                force=force,
            )


def can_take_over(run: RunFolder) -> bool:
    """Whether the run goes on, or waits for its end, without a controller."""
    if not run.journal_file.exists():
        return False
    try:
        claim_control(run.path, patience_s=0.0).close()
    except JobError:
        return False
    return is_held(run.path)


def _is_over(run: RunFolder, since_s: float) -> bool:
    """Whether the run's end was recorded after this time (unix)."""
    ends = [event.at for event in read_events(run.events_file) if isinstance(event, RunFinished)]
    return bool(ends) and ends[-1] > since_s


def _hold(job: Job, run: RunFolder) -> tuple[IO[bytes], bool]:
    """What agents hold the run by, and whether there are some of a controller that died."""
    try:
        return hold_alone(run.path, patience_s=0.0), False
    except JobError:
        is_same = run.job_file.read_bytes() == dump_job(job.spec).encode()
        if is_same and run.journal_file.exists():
            return hold_agents(run.path), True
        return hold_alone(run.path, patience_s=_PATIENCE_S), False


def _listen(run: RunFolder) -> socket.socket:
    """Where agents connect; where the last controller was, if that is free."""
    last = find_controller(run.path)
    for host, port in [*([last.address] if last is not None else []), ("127.0.0.1", 0)]:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            listener.close()
            continue
        listener.listen(4096)
        listener.setblocking(False)
        return listener
    raise OSError("no port is free on 127.0.0.1")


@dataclass(frozen=True, slots=True)
class _Post:
    """What every controller of a run is given, one after the other."""

    job: Job
    plan: Plan
    run: RunFolder
    lock: IO[bytes]
    listener: socket.socket

    def serve(
        self,
        takes_over: bool,
        on_event: Callable[[AnyEvent], None],
        on_progress: Callable[[Progress], None],
        on_beat: Callable[[bool], None],
    ) -> State:
        """Control the run to its end."""
        events = EventLog(self.run.events_file)
        journal = Journal(self.run.journal_file)
        agents = _Agents(self.run, self.lock)
        memory = self._take_over(events, journal, on_event) if takes_over else self._begin(journal)
        host, port = self.listener.getsockname()[:2]
        epoch = memory.state.epoch + takes_over
        in_charge = InCharge(pid=os.getpid(), epoch=epoch, host=host, port=port)
        publish_controller(self.run.path, in_charge)
        controller = Controller(
            memory=memory,
            journal=journal,
            listener=self.listener,
            events=events,
            agents=agents,
            lease_s=self.job.spec.recovery.lease,
            on_event=on_event,
            on_progress=on_progress,
            on_beat=on_beat,
        )
        try:
            return asyncio.run(controller.run())
        finally:
            agents.end()
            events.close()
            journal.close()

    def _begin(self, journal: Journal) -> Memory:
        write_resolved(self.run, self.job.spec, self.plan)
        before = read_events(self.run.events_file)
        fired = Counter(event.fault for event in before if isinstance(event, FaultInjected))
        state = State(
            setup=_setup(self.job, self.plan, before),
            faults=_left(self.job.spec.drill.all_faults, fired),
        )
        memory = Memory(state=state, token=secrets.token_hex(16), lines_before=len(before))
        journal.begin(snapshot(memory))
        return memory

    def _take_over(
        self, events: EventLog, journal: Journal, on_event: Callable[[AnyEvent], None]
    ) -> Memory:
        replayed = replay(self.run.journal_file)
        journal.go_on()
        memory = replayed.memory
        num_written = len(read_events(self.run.events_file)) - memory.lines_before
        for event in replayed.events[max(0, num_written - replayed.events_before) :]:
            events.write(event)
            on_event(event)
        return memory


def _setup(job: Job, plan: Plan, before: list[AnyEvent]) -> Setup:
    return Setup(
        num_nodes=plan.cluster.num_nodes,
        ranks_per_node=plan.cluster.ranks_per_node,
        num_steps=job.spec.train.steps,
        max_restarts=job.spec.recovery.max_restarts,
        grace_s=job.spec.recovery.grace,
        versions=versions(),
        resumed=bool(before),
        first_generation=max((event.generation for event in before), default=0) + 1,
        layout=plan.layout.name,
        num_spares=_num_spares(job, plan),
        heartbeat_s=job.spec.recovery.heartbeat,
        in_order=plan.layout.pipeline == 1,
        peers=peers_of(plan.layout),
        evict_stragglers=job.spec.recovery.evict_stragglers,
        split=plan.layout,
        shrink=job.spec.recovery.shrink,
        replace_timeout_s=job.spec.recovery.replace_timeout,
        tolerance=rounding_bound(plan.layout.global_batch, _UNIT_ROUNDOFF[plan.precision]),
        is_numeric=_was_numeric(before, plan),
        poison=job.spec.recovery.poison,
        node_strikes=job.spec.recovery.node_strikes,
        strike_window_s=job.spec.recovery.strike_window,
        skipped=tuple(
            (event.step, tuple(event.samples))
            for event in before
            if isinstance(event, BatchSkipped)
        ),
    )


def _left(faults: Iterable[str], fired: Counter[str]) -> tuple[str, ...]:
    """Faults that have not happened yet; each counts as often as it was asked for."""
    left = []
    for fault in faults:
        if fired[fault]:
            fired[fault] -= 1
        else:
            left.append(fault)
    return tuple(left)


def _was_numeric(before: Sequence[AnyEvent], plan: Plan) -> bool:
    """Whether earlier parts of the run had another layout, at some time."""
    layouts = {event.layout for event in before if isinstance(event, RunStarted)}
    changed = any(isinstance(event, ExactnessChanged) for event in before)
    return changed or bool(layouts - {plan.layout.name})


def _num_spares(job: Job, plan: Plan) -> int:
    """One warm spare, unless there is nobody whose place it could take while others live on."""
    asked = job.spec.recovery.spares
    return asked if asked != "auto" else int(plan.layout.num_ranks > 1)


def versions() -> dict[str, str]:
    """Of Paceline, Python and, where it is installed, torch."""
    versions = {"paceline": paceline.__version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return versions


class _Agents:
    """The agent processes of this machine."""

    def __init__(self, run: RunFolder, lock: IO[bytes]) -> None:
        self._run = run
        self._lock = lock
        self._processes: list[subprocess.Popen[bytes]] = []
        self._newest: dict[int, subprocess.Popen[bytes]] = {}
        self._adopted: set[int] = set()

    def start(self, address: AgentAddress) -> None:
        command = [
            *(sys.executable, "-m", "paceline.control.agent", "--run", str(self._run.path)),
            *("--node", str(address.node), "--controller", address.controller),
        ]
        with (self._run.logs / f"agent-{address.node}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own session: Ctrl-C in the terminal is for the controller alone.
                start_new_session=True,
                # The run stays held as long as an agent has workers, whatever becomes of us.
                pass_fds=[self._lock.fileno()],
                env=os.environ | {TOKEN_VARIABLE: address.token},
            )
        self._processes.append(process)
        self._newest[address.node] = process

    def kill(self, node: int, pid: int) -> None:
        """SIGKILL to an agent; the kernel then kills its workers."""
        process = self._newest.get(node)
        if process is not None and process.poll() is None:
            process.kill()
        if pid:
            self._adopted.add(pid)
            if _is_agent(pid, self._run):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def is_gone(self, node: int, pid: int) -> bool:
        """Whether the agent has ended. Those of an earlier controller are nobody's children."""
        self._adopted.add(pid)
        for process in self._processes:
            if process.pid == pid:
                return process.poll() is not None
        return not _is_agent(pid, self._run)

    @property
    def kills_surely(self) -> bool:
        """The kernel sees to it: all are on this machine."""
        return True

    def end(self) -> None:
        """Wait until all have ended, and see to it."""
        deadline = time.monotonic() + 10
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in self._alive():
            os.kill(pid, signal.SIGKILL)

    def _alive(self) -> list[int]:
        return [pid for pid in self._adopted if _is_agent(pid, self._run)]


def _end_agents_by_force(run: RunFolder) -> None:
    """SIGKILL to every agent of the run, whoever started it; the kernel kills their workers."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        agents = [pid for pid in pids if _is_agent(pid, run)]
        for pid in agents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not agents:
            break
        time.sleep(0.05)
    if FOLDER.is_dir():
        remove_snapshots(FOLDER, run.path)


def _is_agent(pid: int, run: RunFolder) -> bool:
    """Whether this process is an agent of this run, and no zombie: those have no arguments."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"paceline.control.agent" in arguments and str(run.path).encode() in arguments


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
