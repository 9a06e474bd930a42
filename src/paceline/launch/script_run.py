"""Run a person's own script: the processes and logs around `control/script_run.py`.

They are ranks on this machine, or a launcher on each node of a place (`program_nodes.py`): of those
the process here is the way to the node, which ends the launcher there when its input ends.
"""

import asyncio
import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.control import script_run
from paceline.control.alerts import check_names
from paceline.control.controller import emptied
from paceline.control.environment import script_environment
from paceline.control.kernel import num_oom_kills, where_it_waits
from paceline.control.parent import die_with_parent
from paceline.control.sampling import Sampling
from paceline.control.state import Clock
from paceline.errors import JobError, Problem
from paceline.integrations.log import VARIABLE
from paceline.job import Script
from paceline.job.metrics import check_metrics
from paceline.job.yaml_text import where_in
from paceline.launch.judge_alerts import Alarms, stamped
from paceline.launch.logs import Growing
from paceline.launch.notify import check_variables
from paceline.launch.program_nodes import ProgramNodes
from paceline.launch.script_failure import MAX_BYTES, first_failure
from paceline.launch.script_numbers import LOOK_S
from paceline.launch.script_record import ScriptRecord
from paceline.launch.sinks.run_sinks import check_sinks, sinks_beside
from paceline.record.events import AnyEvent, Reported, RunStarted, read_events
from paceline.record.metrics import read_metrics
from paceline.record.ownership import InCharge, hold_alone, publish_controller
from paceline.record.run import RunFolder
from paceline.record.script_profile import VARIABLE as PROFILE
from paceline.record.starts import keep_start
from paceline.topology.node.reach import free_port

_PROFILER = "paceline.runtime.script_profile"
_TICK_S = LOOK_S
_WORDS_S = 1.0
"""How long the rank that another one lost may take to print its traceback. A guess."""


def check_script(script: Script, *, is_here: bool = True) -> Iterator[Problem]:
    """What can be known to fail before anything is started; of other machines' programs nothing."""
    in_alerts = where_in({}, script.source, "alerts")
    yield from check_names(script.spec.alerts, in_alerts, logs_its_own=True)
    yield from check_variables(script.spec.alerts)
    metrics = script.spec.metrics
    yield from check_metrics(metrics, lambda field: f"{field}, {script.source}")
    yield from check_sinks(metrics, lambda field: f"{field}, {script.source}")
    if not is_here:
        return

    def no_start(what: str, where: str, fix: str) -> Problem:
        return Problem(code="R050", what=what, where=where, fix=fix)

    program = script.spec.command[0]
    here = script.folder / program
    if shutil.which(program) is None and not (here.is_file() and os.access(here, os.X_OK)):
        fix = "name one that is on PATH, such as python, or give its path"
        yield no_start(
            f"there is no program {program!r} to start", f"command, {script.source}", fix
        )
    is_python = Path(program).name.startswith("python") and len(script.spec.command) > 1
    if script.spec.profile and not (is_python and script.spec.command[1].endswith(".py")):
        yield Problem(
            code="R052",
            what=f"only a Python script can be profiled, and the command is {program!r}",
            where=f"profile, {script.source}",
            fix="leave profile out, or name python and the script as the command's first words",
        )
    if not is_python:
        return
    name = script.spec.command[1]
    file = script.folder / name
    where = name if script.source == "--script" else f"command, {script.source}"
    if file.is_dir() and not (file / "__main__.py").is_file():
        fix = "name the script in it that is to be started"
        yield no_start(f"{file} is a folder, and no program of Python's", where, fix)
    elif name.endswith(".py") and not file.is_file():
        fix = f"give the path of one that is there, as seen from {script.folder}"
        yield no_start(f"there is no script {file}", where, fix)


def run_script(
    script: Script,
    run: RunFolder,
    *,
    versions: dict[str, str],
    on_event: Callable[[AnyEvent], None] = lambda event: None,
    on_output: Callable[[int, bytes], None] = lambda rank, content: None,
    on_note: Callable[[str], None] = lambda text: None,
    nodes: ProgramNodes | None = None,
) -> script_run.State:
    """Run a script to its end, and return how it ended.

    Args:
        on_event: Called with every event that is recorded.
        on_output: Called with a rank and what it has printed, as it comes.
        on_note: Called with what is known of sinks that do not have everything.

    Raises:
        JobError: It cannot be started, or another process runs it already.
    """
    JobError.raise_for(check_script(script, is_here=nodes is None))
    # Sinks are waited for when the run is over and no longer held.
    with contextlib.ExitStack() as sinks, hold_alone(run.path, patience_s=5.0):
        sinks.enter_context(sinks_beside(run.path, script.spec.metrics, on_note))
        publish_controller(run.path, InCharge.here(epoch=0, host="127.0.0.1", port=0))
        keep_start(run.path, script.folder)
        before = read_events(run.events_file)
        spec = script.spec
        setup = script_run.Setup(
            num_ranks=script.num_watched,
            word="node" if spec.starts == "nodes" else "rank",
            name=" ".join(spec.command),
            max_restarts=spec.recovery.max_restarts,
            backoff_s=spec.recovery.backoff,
            silence_s=None if spec.recovery.silence == "off" else spec.recovery.silence,
            num_steps=spec.steps,
            step_before=_newest_step(run) if spec.steps is not None else 0,
            grace_s=spec.recovery.grace,
            versions=versions,
            first_attempt=max((event.generation for event in before), default=0) + 1,
            resumed=any(isinstance(event, RunStarted) for event in before),
        )
        record = ScriptRecord(run, num_ranks=script.num_ranks)
        shell = _Shell(script, run, setup, record, on_event, on_output, nodes)
        alarms = Alarms(run.path, spec.name, spec.alerts, None, shell.report)
        sampling = Sampling(run.path, 0, has_gpus=True)
        alarms.start()
        sampling.start()
        try:
            return asyncio.run(shell.serve())
        finally:
            sampling.close()
            alarms.close()
            for event in stamped(shell.take_unrecorded(), shell.attempt):
                record.write(event)
                on_event(event)
            record.close()


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    log: Growing
    oom_kills: int | None


class _Shell:
    """Clock, processes and files around the pure decisions."""

    def __init__(
        self,
        script: Script,
        run: RunFolder,
        setup: script_run.Setup,
        record: ScriptRecord,
        on_event: Callable[[AnyEvent], None],
        on_output: Callable[[int, bytes], None],
        nodes: ProgramNodes | None,
    ) -> None:
        self._script = script
        self._run = run
        self._nodes = nodes
        self._state = script_run.State(setup=setup)
        self._record = record
        self._on_event = on_event
        self._on_output = on_output
        self._ranks: dict[int, _Rank] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._reported: queue.SimpleQueue[Reported] = queue.SimpleQueue()

    def report(self, event: Reported) -> None:
        """Record what was found beside the run, and act on it, at the next tick; from any
        thread."""
        self._reported.put(event)

    def take_unrecorded(self) -> list[Reported]:
        """What was reported after the run's end."""
        return list(emptied(self._reported))

    @property
    def attempt(self) -> int:
        """Which attempt it is at, from 1 over all parts of the run."""
        return self._state.attempt

    async def serve(self) -> script_run.State:
        loop = asyncio.get_running_loop()
        stopping = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup: outlive the terminal
            stopping.remove(signal.SIGHUP)
        for number in stopping:
            loop.add_signal_handler(
                number, self._feed, script_run.StopWanted(signal.Signals(number).name)
            )
        try:
            self._feed(script_run.Begin())
            while True:
                await asyncio.sleep(_TICK_S)
                self._follow()
                if self._state.phase == "over":
                    break  # what is reported now is taken as unrecorded
                for event in emptied(self._reported):
                    self._feed(script_run.Found(event))
                self._feed(script_run.Tick())
            if self._waiting:
                await asyncio.wait(self._waiting, timeout=10)
            self._follow()
        finally:
            self._send(signal.SIGKILL)
            for number in stopping:
                loop.remove_signal_handler(number)
        return self._state

    def _feed(self, event: script_run.Happening) -> None:
        clock = Clock(monotonic_s=time.monotonic(), unix_s=time.time())
        for action in script_run.decide(self._state, event, clock):
            match action:
                case script_run.Record(recorded):
                    self._record.write(recorded)
                    self._on_event(recorded)
                case script_run.Start(attempt, restarts):
                    self._start(attempt, restarts)
                case script_run.Signal(number):
                    self._send(signal.Signals(number))
                case script_run.Look():
                    task = asyncio.create_task(self._look(self._state.attempt))
                    self._waiting.add(task)
                    task.add_done_callback(self._waiting.discard)

    def _start(self, attempt: int, restarts: int) -> None:
        spec, port, num_watched = self._script.spec, free_port(), self._script.num_watched
        self._record.begin(attempt)
        threads = max(1, (os.cpu_count() or 1) // num_watched)
        self._ranks = {}
        for rank in range(num_watched):
            given = {VARIABLE: str(self._record.logged)}
            if spec.starts == "nodes":
                given["NODE_RANK"] = str(rank)
            else:
                given |= script_environment(
                    rank, num_ranks=num_watched, port=port, restarts=restarts, threads=threads
                )
            path = self._run.rank_log(rank)
            with path.open("ab") as log:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                log.write(f"--- attempt {attempt}, {stamp}\n".encode())
                log.flush()
                begins = log.tell()
                try:
                    process = (
                        self._popen(rank, given | spec.environment, log.fileno())
                        if self._nodes is None
                        else self._start_there(self._nodes, rank, attempt, log.fileno())
                    )
                except OSError as error:
                    self._feed(script_run.NotStarted(rank, f"cannot be started: {error.strerror}"))
                    return
            self._ranks[rank] = _Rank(process, Growing(path, at=begins), num_oom_kills())
            self._feed(script_run.Started(rank, process.pid))
            task = asyncio.create_task(self._wait(rank, attempt, self._ranks[rank]))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    def _popen(self, rank: int, given: dict[str, str], log: int) -> subprocess.Popen[bytes]:
        parent, command = os.getpid(), self._script.spec.command
        if rank == 0 and self._script.spec.profile:
            command = [command[0], "-m", _PROFILER, *command[1:]]
            given = {PROFILE: str(self._run.path / "profile.json")} | given
        environment = dict(os.environ)
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        return subprocess.Popen(
            command,
            cwd=self._script.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Kept over exec: the kernel ends the ranks with us, whatever becomes of us.
            preexec_fn=lambda: die_with_parent(parent),
            env=environment | given,
        )

    def _start_there(
        self, nodes: ProgramNodes, node: int, attempt: int, log: int
    ) -> subprocess.Popen[bytes]:
        """The way to a node. Its input stays open as long as the launcher is to run."""
        parent = os.getpid()
        return subprocess.Popen(
            nodes.command(
                self._script,
                str(self._run.path),
                node,
                attempt=attempt,
                given={VARIABLE: str(self._record.logged)},
            ),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )

    async def _wait(self, rank: int, attempt: int, started: _Rank) -> None:
        """Report an exit the moment the kernel knows of it."""
        returncode = await _exit_of(started.process)
        if started.process.stdin is not None:
            started.process.stdin.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.process.pid, signal.SIGKILL)  # what it started ends with it
        is_first = returncode != 0 and self._state.phase in ("running", "looking")
        raised = await self._raised(rank) if is_first else None
        self._follow()
        self._record.end(rank)
        kills = num_oom_kills()
        out_of_memory = (
            returncode == -signal.SIGKILL
            and self._state.phase == "running"
            and None not in (kills, started.oom_kills)
            and kills != started.oom_kills
        )
        self._feed(script_run.Exited(rank, attempt, returncode, out_of_memory, raised))

    async def _raised(self, ended: int) -> script_run.Raised | None:
        """What ended the attempt. Where a rank only lost another one, that one has a moment to
        print its exception before all are killed."""
        raised = None
        for _ in range(int(_WORDS_S / _TICK_S)):
            printed = {rank: each.log.end(MAX_BYTES) for rank, each in self._ranks.items()}
            raised = first_failure(printed, ended)
            if raised is None or not raised.is_passing or self._state.phase != "running":
                break
            await asyncio.sleep(_TICK_S)
        return raised

    async def _look(self, attempt: int) -> None:
        alive = {n: r.process.pid for n, r in self._ranks.items() if r.process.poll() is None}
        if self._nodes is not None:  # what runs here is the way to the node alone
            self._feed(script_run.Looked(attempt, {}))
            return
        found = await asyncio.gather(*(_stacks(pid) for pid in alive.values()))
        self._feed(script_run.Looked(attempt, dict(zip(alive, found, strict=True))))

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks.values():
            if rank.process.returncode is not None:
                continue
            if rank.process.stdin is not None:  # the node ends its launcher with SIGTERM
                rank.process.stdin.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.killpg(rank.process.pid, number)
                elif rank.process.stdin is not None:
                    continue
                else:
                    os.kill(rank.process.pid, number)

    def _follow(self) -> None:
        at, printed = time.time(), False
        has_progressed = self._record.take_logged()
        for rank, each in self._ranks.items():
            content = each.log.more()
            if content:
                printed = True
                self._on_output(rank, content)
                has_progressed |= self._record.take(rank, content, at)
        if printed or has_progressed:
            self._feed(script_run.Printed(has_progressed, self._record.step))


def _newest_step(run: RunFolder) -> int:
    return max((each.step for each in read_metrics(run.metrics_file)), default=0)


_PY_SPY_S = script_run.STACKS_S * 0.8
"""How long one process may be looked at; the rest is for what the kernel says of it."""


async def _stacks(pid: int) -> str:
    """Where a process stands: its Python lines if py-spy is installed, else the kernel's view."""
    beside = Path(sys.executable).with_name("py-spy")
    py_spy = str(beside) if beside.is_file() else shutil.which("py-spy")
    if py_spy is not None:
        process = await asyncio.create_subprocess_exec(
            *(py_spy, "dump", "--nonblocking", "--pid", str(pid)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            text, _ = await asyncio.wait_for(process.communicate(), _PY_SPY_S)
            if process.returncode == 0:
                return text.decode(errors="replace")
        except TimeoutError:
            process.kill()
    return where_it_waits(pid)


async def _exit_of(process: subprocess.Popen[bytes]) -> int:
    if not hasattr(os, "pidfd_open"):  # not Linux
        return await asyncio.to_thread(process.wait)
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    fd = os.pidfd_open(process.pid)
    loop.add_reader(fd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.wait()
