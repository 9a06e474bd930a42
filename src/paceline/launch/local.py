"""This machine as a place: one agent process for each node of the plan."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from paceline.control.agent import TOKEN_VARIABLE
from paceline.control.controller import AgentAddress
from paceline.control.host_agents import agents_here, end_agents
from paceline.errors import Problem
from paceline.job import Job
from paceline.launch.places import LATER, Inspection, Start
from paceline.plan import Plan
from paceline.record.run import RunFolder
from paceline.record.snapshot_files import FOLDER, remove_snapshots
from paceline.topology import Cluster
from paceline.topology.machine import find_local_machine
from paceline.topology.node.reach import is_free
from paceline.units import counted


def check(job: Job, plan: Plan) -> Iterator[Problem]:
    if not plan.cluster.is_local:
        yield Problem(
            code="R011",
            what=f"the job asks for {counted(plan.cluster.num_nodes, 'node')} of "
            f"{plan.cluster.ranks_per_node} {plan.cluster.accelerator}; {_gpus_here()}",
            where=job.where("cluster"),
            fix="leave cluster out to run on this machine, or set cluster.accelerator to cpu; "
            "`paceline plan` works for any cluster",
        )
    port = job.spec.cluster.rendezvous_port
    if port != "auto" and not is_free(port):
        yield Problem(
            code="R012",
            what=f"port {port} is in use on 127.0.0.1",
            where=job.where("cluster.rendezvous_port"),
            fix="leave it out to take a free port, or end the program that holds it",
        )


def starts(job: Job, plan: Plan, run: RunFolder) -> list[Start]:
    return [
        Start(host="this machine", command=_agent_command(run, node, LATER))
        for node in range(plan.cluster.num_nodes)
    ]


def open_site(
    job: Job,
    plan: Plan,
    run: RunFolder,
    on_note: Callable[[str], None],
    inspection: Inspection | None,
) -> "Here":
    """This machine, which is looked at before there is a run."""
    return Here(run)


@dataclass(frozen=True, slots=True)
class Here:
    """This machine, for one run."""

    run: RunFolder

    @property
    def address(self) -> str:
        """Nobody else is to reach the controller."""
        return "127.0.0.1"

    def agents(self, lock: IO[bytes]) -> "_Agents":
        return _Agents(self.run, lock)

    def end_by_force(self) -> None:
        """SIGKILL to every agent of the run, whoever started it; the kernel kills their workers."""
        end_agents(self.run.path)
        if FOLDER.is_dir():
            remove_snapshots(FOLDER, self.run.path)


class _Agents:
    """The agent processes of this machine."""

    def __init__(self, run: RunFolder, lock: IO[bytes]) -> None:
        self._run = run
        self._lock = lock
        self._processes: list[subprocess.Popen[bytes]] = []
        self._newest: dict[int, subprocess.Popen[bytes]] = {}
        self._adopted: set[int] = set()

    def start(self, address: AgentAddress) -> None:
        command = _agent_command(self._run, address.node, address.controller)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = own_gpus(self._run.cluster(), address.node, visible)
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
                env=os.environ | {TOKEN_VARIABLE: address.token} | gpus,
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
            for agent in agents_here(self._run.path, pid=pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent, signal.SIGKILL)

    def is_gone(self, node: int, pid: int) -> bool:
        """Whether the agent has ended. Those of an earlier controller are nobody's children."""
        self._adopted.add(pid)
        for process in self._processes:
            if process.pid == pid:
                return process.poll() is not None
        return not agents_here(self._run.path, pid=pid)

    @property
    def kills_surely(self) -> bool:
        """The kernel sees to it: all are on this machine."""
        return True

    def end(self) -> None:
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
        return [pid for pid in self._adopted if agents_here(self._run.path, pid=pid)]


def own_gpus(cluster: Cluster, node: int, visible: str | None) -> dict[str, str]:
    """The variable that gives a simulated node's agent its share of this machine's GPUs.

    Args:
        node: The simulated node, from 0.
    """
    if cluster.accelerator == "cpu" or cluster.num_nodes == 1:
        return {}
    every = range(cluster.num_ranks) if visible is None else visible.split(",")
    first = node * cluster.ranks_per_node
    own = list(every)[first : first + cluster.ranks_per_node]
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in own)}


def _agent_command(run: RunFolder, node: int, controller: str) -> list[str]:
    return [
        *(sys.executable, "-m", "paceline.control.agent", "--run", str(run.path)),
        *("--node", str(node), "--controller", controller),
    ]


def _gpus_here() -> str:
    """What this machine shows instead, for a job that asks for more."""
    machine = find_local_machine()
    if machine.why_no_gpus is not None:
        return f"this machine shows no GPU: {machine.why_no_gpus}"
    kinds = Counter(gpu.name for gpu in machine.gpus)
    shown = " and ".join(f"{count} {name}" for name, count in kinds.items()) or "no GPU"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    through = f" through CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
    return f"this machine shows {shown}{through}"
