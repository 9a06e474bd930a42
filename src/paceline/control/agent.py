"""One node's agent: starts workers, sees them exit at once, and leaves none behind.

    python -m paceline.control.agent --run DIR --node 0 --controller 127.0.0.1:4711

It obeys the controller. When the controller is gone it asks the workers to stop at a step
boundary, waits for the grace, kills what is left and ends. When the agent itself is killed the
kernel kills its workers (each asks for that at its start, see `parent.die_with_parent`).
"""

import argparse
import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.control import messages as say
from paceline.control.beats import BEAT_EVERY_S
from paceline.control.injection import carry_out
from paceline.control.kernel import num_oom_kills
from paceline.control.lookout import LOOK_EVERY_S, Finding, Lookout, where
from paceline.control.nursery import Child, Nursery
from paceline.control.probe import answer_probes
from paceline.control.slots import SlotFile, create_slot
from paceline.record.run import RunFolder, open_run
from paceline.record.snapshot_files import FOLDER, remove_snapshots
from paceline.spec.faults import parse_fault
from paceline.topology import Cluster

TOKEN_VARIABLE = "PACELINE_TOKEN"
"""Environment variable with the secret that proves an agent belongs to this controller."""

LINE_LIMIT = 1 << 20
"""Longest message in bytes; a worker's last words are cut well below it."""


@dataclass(slots=True)
class _Worker:
    """A worker process and our end of its channel."""

    number: int
    process: Child
    channel: asyncio.StreamWriter
    reader: asyncio.Task[None]
    log: Path
    fenced: bool = False


class Agent:
    """The agent of one node."""

    def __init__(self, *, run: RunFolder, node: int, controller: tuple[str, int]) -> None:
        self._run = run
        self._node = node
        self._controller = controller
        self._workers: dict[int, _Worker] = {}
        self._to_controller: asyncio.StreamWriter | None = None
        self._exits: set[asyncio.Task[None]] = set()
        self._oom_kills = num_oom_kills()
        self._looking: asyncio.Task[None] | None = None
        self._injections: set[asyncio.Task[None]] = set()
        spec = run.job().spec
        self._grace_s = spec.recovery.grace
        self._lookout = Lookout(floor_s=spec.recovery.patience)
        cluster = run.plan().cluster
        # Snapshots lie by node, and on one machine every rank stands for a node.
        per_agent = cluster.ranks_per_node if cluster.is_local else 1
        self._memories = range(node * per_agent, (node + 1) * per_agent)
        self._ranks_per_node = cluster.ranks_per_node
        self._nursery = Nursery(_environment(cluster), run.logs / f"agent-{node}.log")

    async def serve(self) -> None:
        """Obey the controller until it says leave, or is gone."""
        host, port = self._controller
        reader, writer = await asyncio.open_connection(host, port, limit=LINE_LIMIT)
        self._to_controller = writer
        self._nursery.open()
        token = os.environ.get(TOKEN_VARIABLE, "")
        here = writer.get_extra_info("sockname")[0]
        self._report(
            say.AgentReady(
                node=self._node, token=token, pid=os.getpid(), probe_port=answer_probes(here)
            )
        )
        always = [asyncio.create_task(self._beat()), asyncio.create_task(self._watch())]
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
            for task in always:
                task.cancel()
            await self._end_all()
            self._lookout.close()
            self._nursery.close()
            for node in self._memories:
                remove_snapshots(FOLDER, self._run.path, node=node)
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
            case say.Look():
                if self._looking is None or self._looking.done():
                    self._looking = asyncio.create_task(self._look_closer())
            case say.InjectFault():
                self._inject(order)
            case say.Leave():
                pass

    async def _beat(self) -> None:
        while True:
            self._report(say.Beat())
            await asyncio.sleep(BEAT_EVERY_S)

    async def _watch(self) -> None:
        """Tell of workers that have stood still for too long."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for found in self._lookout.late():
                self._report(
                    say.Stuck(
                        worker=found.worker,
                        generation=found.reading.generation,
                        kind=found.sight.kind,
                        phase=found.reading.phase.words,
                        waited_s=found.sight.waited_s,
                        limit_s=found.limit_s,
                    )
                )

    async def _look_closer(self) -> None:
        """Tell what is to be seen of every worker; a late one's log gets it too."""
        for found in await self._lookout.look_closer():
            worker = self._workers.get(found.worker)
            if worker is None:
                continue
            self._report(_seen(found))
            if found.is_late:
                with worker.log.open("ab") as log:
                    log.write(f"--- stuck in {where(found.reading)}\n{found.stacks}\n".encode())

    def _fence(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.fenced = True
            worker.process.kill()

    def _inject(self, order: say.InjectFault) -> None:
        """Say that a drill's fault happens now, and have it happen."""
        worker = self._workers.get(order.worker)
        if worker is None:
            return
        fault = parse_fault(order.fault)
        pid, now = worker.process.pid, time.monotonic()
        self._report(
            say.FaultDone(worker=order.worker, pid=pid, fault=order.fault, monotonic_s=now)
        )
        if fault.row.maker == "worker":
            worker.channel.write(say.encode(say.Fire(fault=order.fault)))
            return
        pids = [each.process.pid for each in self._workers.values()]
        task = asyncio.create_task(carry_out(fault, pid, pids, self._run.checkpoints))
        self._injections.add(task)
        task.add_done_callback(self._injections.discard)
        if fault.kind == "partition" and self._to_controller is not None:
            self._to_controller.transport.abort()

    async def _start(self, order: say.StartWorker) -> None:
        ours, theirs = socket.socketpair()
        slot = create_slot(order.worker)
        logs = self._run
        path = logs.spare_log(order.worker) if order.rank is None else logs.rank_log(order.rank)
        with path.open("ab") as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- worker {order.worker}, {stamp}\n".encode())
            log.flush()
            process = self._nursery.start(
                order.worker,
                ["--run", str(self._run.path)],
                self._place_of(order.rank),
                channel=theirs,
                slot=slot.fd,
                log=log,
            )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
        listening = asyncio.create_task(self._listen(order.worker, reader))
        worker = _Worker(order.worker, process, writer, listening, path)
        self._workers[order.worker] = worker
        task = asyncio.create_task(self._follow(worker, slot))
        self._exits.add(task)
        task.add_done_callback(self._exits.discard)

    def _place_of(self, rank: int | None) -> dict[str, str]:
        """The names torch reads. A spare learns its rank when it joins."""
        if rank is None:
            return {}
        return {"RANK": str(rank), "LOCAL_RANK": str(rank % self._ranks_per_node)}

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

    async def _follow(self, worker: _Worker, slot: SlotFile) -> None:
        """Report a worker's birth, and its exit the moment it is known of."""
        pid = await worker.process.born()
        if pid:
            self._lookout.add(worker.number, pid, slot)
            self._report(say.Started(worker=worker.number, pid=pid))
        returncode = await worker.process.wait()
        self._lookout.drop(worker.number)
        # Last words first. A grandchild may hold the channel open, so do not wait long for its end.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(worker.reader, timeout=0.2)
        worker.process.end_group()  # what it started ends with it
        worker.channel.close()
        del self._workers[worker.number]
        self._report(
            say.Exited(
                worker=worker.number,
                pid=pid,
                returncode=returncode,
                fenced=worker.fenced,
                out_of_memory=self._is_out_of_memory(worker, returncode),
            )
        )

    def _is_out_of_memory(self, worker: _Worker, returncode: int) -> bool:
        """Whether a SIGKILL that nobody here sent came with one more of the kernel's."""
        kills = num_oom_kills()
        before, self._oom_kills = self._oom_kills, kills
        if returncode != -signal.SIGKILL or worker.fenced or None in (kills, before):
            return False
        return kills != before

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
            worker.process.kill()
        if self._exits:
            await asyncio.wait(self._exits, timeout=5)

    def _report(self, message: say.FromAgent) -> None:
        if self._to_controller is not None and not self._to_controller.is_closing():
            self._to_controller.write(say.encode(message))


def _seen(found: Finding) -> say.Seen:
    return say.Seen(
        worker=found.worker,
        generation=found.reading.generation,
        kind=found.sight.kind,
        is_certain=found.sight.is_certain,
        phase=found.reading.phase.words,
        step=found.reading.step,
        micro_batch=found.reading.micro_batch,
        waited_s=found.sight.waited_s,
        limit_s=found.limit_s if math.isfinite(found.limit_s) else None,
        is_late=found.is_late,
        in_collective=found.in_collective,
        stacks=found.stacks,
    )


def _environment(cluster: Cluster) -> dict[str, str]:
    """What a launcher must set for every worker: no more threads than cores, and where to talk."""
    environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    environment |= {
        "WORLD_SIZE": str(cluster.ranks_per_node * cluster.num_nodes),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "PYTHONUNBUFFERED": "1",
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, int(cluster.cores_per_rank or 1))))
    # Gloo would take the interface of the host's name; everything here is on this machine.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environment


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
