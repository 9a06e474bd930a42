"""A run whose controller is in the test's own process, so that a test can come between."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.run.scene import Record, Scene

from paceline.control.agent import TOKEN_VARIABLE
from paceline.control.controller import AgentAddress, Controller, Progress
from paceline.control.failover import Memory, snapshot
from paceline.control.journal import Journal
from paceline.control.state import Setup, State
from paceline.job import load_job
from paceline.plan import plan_job
from paceline.record import events as log
from paceline.record.run import RunFolder, create_run

OneAddress = Callable[[AgentAddress], str]


@dataclass
class Remote:
    """Agents as on other machines, which may be out of reach: nothing but their own lease surely
    ends them."""

    run: RunFolder
    prefix: Callable[[int], Sequence[str]] = lambda node: ()
    """Of the command, by node."""

    environment: Callable[[int], Mapping[str, str]] = lambda node: {}
    address: OneAddress = lambda address: address.controller
    """Where they are told that the controller is."""

    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    kills_surely: bool = False

    def start(self, address: AgentAddress) -> None:
        command = [
            *self.prefix(address.node),
            *(sys.executable, "-m", "paceline.control.agent", "--run", str(self.run.path)),
            *("--node", str(address.node), "--controller", self.address(address)),
        ]
        with (self.run.logs / f"agent-{address.node}.log").open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    TOKEN_VARIABLE: address.token,
                    **self.environment(address.node),
                },
            )
        self.started.append(process)

    def kill(self, node: int, pid: int) -> None:
        pass

    def is_gone(self, node: int, pid: int) -> bool:
        return any(each.pid == pid and each.poll() is not None for each in self.started)

    def end(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def control(
    scene: Scene,
    out: str,
    settings: Sequence[str],
    *,
    host: str = "127.0.0.1",
    make_agents: Callable[[RunFolder], Remote] = Remote,
    on_progress: Callable[[Memory, Progress], None] = lambda memory, progress: None,
    beside: Callable[[tuple[str, int]], "asyncio.Future[None] | None"] = lambda address: None,
) -> Record:
    """Run the scene's job to its end, two nodes of one rank each.

    Args:
        on_progress: Called with all that the controller knows, after every word of a rank.
        beside: Called once the controller listens, with where.
    """
    job = load_job(scene.folder / "job.yaml", tuple(settings))
    plan = plan_job(job)
    run = create_run(job, plan, folder=scene.folder / out, runs=scene.folder)
    recovery = job.spec.recovery
    assert isinstance(recovery.spares, int)
    setup = Setup(
        num_nodes=2,
        ranks_per_node=1,
        num_steps=job.spec.train.steps,
        max_restarts=recovery.max_restarts,
        grace_s=recovery.grace,
        versions={},
        resumed=False,
        layout=plan.layout.name,
        num_spares=recovery.spares,
        heartbeat_s=recovery.heartbeat,
    )
    memory = Memory(state=State(setup=setup), token="by hand", lines_before=0)
    journal = Journal(run.journal_file)
    journal.begin(snapshot(memory))
    listener = socket.create_server((host, 0))
    listener.setblocking(False)
    agents = make_agents(run)
    controller = Controller(
        memory=memory,
        journal=journal,
        listener=listener,
        events=log.event_log(run.events_file),
        agents=agents,
        lease_s=recovery.lease,
        on_progress=lambda progress: on_progress(memory, progress),
    )

    async def serve() -> None:
        going_on = beside(listener.getsockname())
        await asyncio.wait_for(controller.run(), 300)
        if going_on is not None:
            going_on.cancel()

    try:
        asyncio.run(serve())
    finally:
        agents.end()
    return scene.record(out)
