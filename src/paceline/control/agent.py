"""One node's agent: starts workers, sees them exit at once, and leaves none behind.

    python -m paceline.control.agent --run DIR --node 0 --controller 127.0.0.1:4711

It obeys the controller. When the controller is gone it asks the workers to stop at a step
boundary, waits for the grace, kills what is left and ends. When the agent itself is killed the
kernel kills its workers (each asks for that at its start, see `die_with_parent`).
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.control import messages as say
from paceline.record.run import RunFolder, open_run

TOKEN_VARIABLE = "PACELINE_TOKEN"
"""Environment variable with the secret that proves an agent belongs to this controller."""

LINE_LIMIT = 1 << 20
"""Longest message in bytes; a worker's last words are cut well below it."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere nothing).

    Exits at once when the parent is gone already: prctl(2) does not look back.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@dataclass(slots=True)
class _Worker:
    """A worker process and our end of its channel."""

    number: int
    process: subprocess.Popen[bytes]
    channel: asyncio.StreamWriter
    reader: asyncio.Task[None]
    fenced: bool = False

    def kill(self) -> None:
        """SIGKILL to its whole process group, if it is still ours."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Agent:
    """The agent of one node."""

    def __init__(self, *, run: RunFolder, node: int, controller: tuple[str, int]) -> None:
        self._run = run
        self._node = node
        self._controller = controller
        self._workers: dict[int, _Worker] = {}
        self._to_controller: asyncio.StreamWriter | None = None
        self._exits: set[asyncio.Task[None]] = set()
        spec = run.job().spec
        self._grace_s = spec.recovery.grace
        cluster = run.plan().cluster
        self._ranks_per_node = cluster.ranks_per_node
        self._num_ranks = cluster.ranks_per_node * cluster.num_nodes
        self._threads = max(1, int(cluster.cores_per_rank or 1))

    async def serve(self) -> None:
        """Obey the controller until it says leave, or is gone."""
        host, port = self._controller
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
        self._to_controller = writer
        token = os.environ.get(TOKEN_VARIABLE, "")
        self._report(say.AgentReady(node=self._node, token=token, pid=os.getpid()))
        try:
            while line := await reader.readline():
                order = say.to_agent(line)
                if isinstance(order, say.Leave):
                    await self._let_exit()
                    break
                await self._obey(order)
            else:
                await self._stop_gently()
        except ConnectionError:
            await self._stop_gently()
        finally:
            await self._end_all()
            writer.close()

    async def _obey(self, order: say.ToAgent) -> None:
        match order:
            case say.StartWorker():
                await self._start(order)
            case say.Tell():
                worker = self._workers.get(order.worker)
                if worker is not None:
                    worker.channel.write(say.encode(order.message))
            case say.KillWorker():
                self._fence(self._workers.get(order.worker))
            case say.KillWorkers():
                for worker in self._workers.values():
                    self._fence(worker)
            case say.InjectFault():
                worker = self._workers.get(order.worker)
                if worker is not None:
                    now = time.monotonic()
                    worker.kill()
                    self._report(
                        say.FaultDone(
                            worker=order.worker,
                            pid=worker.process.pid,
                            fault=order.fault,
                            monotonic_s=now,
                        )
                    )
            case say.Leave():
                pass

    def _fence(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.fenced = True
            worker.kill()

    async def _start(self, order: say.StartWorker) -> None:
        ours, theirs = socket.socketpair()
        command = [
            *(sys.executable, "-m", "paceline.runtime.worker"),
            *("--run", str(self._run.path), "--channel", str(theirs.fileno())),
            *("--agent", str(os.getpid())),
        ]
        logs = self._run
        path = logs.spare_log(order.worker) if order.rank is None else logs.rank_log(order.rank)
        with path.open("ab") as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- worker {order.worker}, {stamp}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=self._worker_environment(order.rank),
            )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        listening = asyncio.create_task(self._listen(order.worker, reader))
        worker = _Worker(order.worker, process, writer, listening)
        self._workers[order.worker] = worker
        self._report(say.Started(worker=order.worker, pid=process.pid))
        task = asyncio.create_task(self._wait(worker))
        self._exits.add(task)
        task.add_done_callback(self._exits.discard)

    def _worker_environment(self, rank: int | None) -> dict[str, str]:
        """What the launcher must set: the names torch reads, and no more threads than cores. A
        spare learns its rank when it joins."""
        environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        environment |= {
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks_per_node),
            "PYTHONUNBUFFERED": "1",
        }
        if rank is not None:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank % self._ranks_per_node)}
            environment |= place
        environment.setdefault("OMP_NUM_THREADS", str(self._threads))
        # Gloo would take the interface of the host's name; everything here is on this machine.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        return environment

    async def _listen(self, number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # ValueError: beyond LINE_LIMIT
            while line := await reader.readline():
                try:
                    word = say.from_worker(line)
                except msgspec.DecodeError:
                    continue  # the torn last line of a worker that was killed while writing
                self._report(
                    say.Said(worker=number, generation=word.generation, message=word.message)
                )

    async def _wait(self, worker: _Worker) -> None:
        """Report an exit the moment the kernel knows of it."""
        await _exit_of(worker.process)
        # Last words first. A grandchild may hold the channel open, so do not wait long for its end.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(worker.reader, timeout=0.2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)  # what it started ends with it
        worker.channel.close()
        del self._workers[worker.number]
        self._report(
            say.Exited(
                worker=worker.number,
                pid=worker.process.pid,
                returncode=worker.process.returncode,
                fenced=worker.fenced,
            )
        )

    async def _let_exit(self) -> None:
        """The workers have said all they have to say."""
        for worker in self._workers.values():
            worker.channel.write(say.encode(say.Exit()))
        if self._exits:
            await asyncio.wait(self._exits, timeout=5)

    async def _stop_gently(self) -> None:
        """The controller is gone: let the workers reach a step boundary and save."""
        for worker in self._workers.values():
            worker.channel.write(say.encode(say.StopAtBoundary()))
        if self._exits:
            await asyncio.wait(self._exits, timeout=self._grace_s)

    async def _end_all(self) -> None:
        for worker in list(self._workers.values()):
            worker.fenced = True
            worker.kill()
        if self._exits:
            await asyncio.wait(self._exits, timeout=5)

    def _report(self, message: say.FromAgent) -> None:
        if self._to_controller is not None and not self._to_controller.is_closing():
            self._to_controller.write(say.encode(message))


async def _exit_of(process: subprocess.Popen[bytes]) -> None:
    """Return once the process has ended and is reaped."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        await asyncio.to_thread(process.wait)
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    fd = os.pidfd_open(process.pid)
    loop.add_reader(fd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    process.wait()


def main() -> None:
    """Entry point of the agent's process."""
    parser = argparse.ArgumentParser(prog="paceline-agent", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--node", type=int, required=True, help="this node, from 0")
    parser.add_argument("--controller", required=True, help="host:port of the controller")
    options = parser.parse_args()
    host, _, port = options.controller.rpartition(":")
    # Ctrl-C in a terminal reaches the controller, which decides; the agent only obeys.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent(run=open_run(options.run), node=options.node, controller=(host, int(port)))
    asyncio.run(agent.serve())


if __name__ == "__main__":
    main()
