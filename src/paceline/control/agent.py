"""One node's agent: starts workers, sees them exit at once, and leaves none behind.

    python -m paceline.control.agent --run DIR --node 0 --controller 127.0.0.1:4711

Its workers talk to others at the address and over the interface from which this machine reaches the
controller, unless `PACELINE_HOST` and `GLOO_SOCKET_IFNAME` in the environment say otherwise. Its
fork server is `paceline.runtime.fork_server`, unless `PACELINE_FORK_SERVER` names another one
(tests do). The secret that it is known by comes in the environment, or as the first line of
standard input: an argument could be read by everybody on the machine.

It obeys the controller. When the controller is gone training goes on, what the workers say is kept
for the next one, and the agent looks for it (`control.json` in the run's folder). When none has
come for the time of the lease it asks the workers to stop at a step boundary, waits for the grace,
kills what is left and ends. When the agent itself is killed the kernel kills its workers (each asks
for that at its start, see `parent.die_with_parent`).
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.control import messages as say
from paceline.control.controller_connection import LINE_LIMIT, Uplink
from paceline.control.environment import environment_of_workers, undone
from paceline.control.fork_server import Child, ForkServer
from paceline.control.health import EVERY_S, open_health, own_gpus
from paceline.control.injection import carry_out
from paceline.control.kernel import num_oom_kills
from paceline.control.limits import raise_open_files
from paceline.control.network import split_address
from paceline.control.sampling import Sampling
from paceline.control.slots import Phase, SlotFile, create_slot
from paceline.control.worker_watch import LOOK_EVERY_S, STACKS_WAIT_S, Lookout, where
from paceline.errors import RunError
from paceline.job.fault_grammar import parse_fault
from paceline.record.events import Noted
from paceline.record.machines import RankSample
from paceline.record.ownership import hold_agents, machine
from paceline.record.run import RunFolder, open_run
from paceline.record.snapshot_files import FOLDER, remove_snapshots
from paceline.topology.machine import find_gpu_uuids

TOKEN_VARIABLE = "PACELINE_TOKEN"
"""Environment variable with the secret that proves an agent belongs to this controller."""

ORPHANED = 4
"""Exit code of an agent that ended because no controller was there for the time of its lease."""


@dataclass(slots=True)
class _Worker:
    """A worker process and our end of its channel."""

    number: int
    process: Child
    channel: asyncio.StreamWriter
    reader: asyncio.Task[None]
    log: Path
    rank: int | None
    """Its place; None is a spare's."""

    waits: bool = True
    """Whether it has nothing to do until it is told: before, between and after generations."""

    fenced: bool = False
    collectives: dict[str, say.At] | None = None
    """Its answer when it was last asked how far it is; None until it comes."""


class Agent:
    """The agent of one node."""

    def __init__(
        self, *, run: RunFolder, node: int, controller: tuple[str, int], token: str
    ) -> None:
        self._run = run
        self._node = node
        self._uplink = Uplink(
            run=run.path, node=node, controller=controller, token=token, obey=self._obey
        )
        self._stops = False
        self.is_orphaned = False
        """Whether it ends for want of a controller."""

        self._workers: dict[int, _Worker] = {}
        self._exits: set[asyncio.Task[None]] = set()
        self._oom_kills = num_oom_kills()
        self._looking: asyncio.Task[None] | None = None
        self._injections: set[asyncio.Task[None]] = set()
        spec = run.job().spec
        self._grace_s = spec.recovery.grace
        cluster = run.cluster()
        num_ranks = cluster.ranks_per_node * cluster.num_nodes
        self._on_accelerator = cluster.backend != "gloo"
        self._lookout = Lookout(
            floor_s=spec.recovery.patience,
            num_ranks=num_ranks,
            on_accelerator=self._on_accelerator,
        )
        # Snapshots lie by node, and on a single machine every rank stands for a node.
        is_alone = cluster.is_local and cluster.num_nodes == 1
        per_agent = cluster.ranks_per_node if is_alone else 1
        self._memories = range(node * per_agent, (node + 1) * per_agent)
        self._ranks_per_node = cluster.ranks_per_node
        self._fork_server = ForkServer(
            environment_of_workers(
                cluster,
                controller[0],
                limit_s=spec.recovery.collective_timeout,
                without=TOKEN_VARIABLE,
            )
            | {"PACELINE_NODE": str(node)}
            | own_gpus(
                find_gpu_uuids() if self._on_accelerator else [],
                os.environ.get("CUDA_VISIBLE_DEVICES"),
            ),
            run.logs / f"agent-{node}.log",
        )

    async def serve(self) -> None:
        """Obey the controller, and those that follow it, until one says leave, or none is there."""
        self._fork_server.open()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._tell_of_leaving)
        always = [
            asyncio.create_task(work())
            for work in (self._uplink.beat, self._uplink.follow, self._watch, self._outlive)
        ]
        # Beside them: that it ends, or fails, ends nothing else.
        gpus = asyncio.create_task(self._watch_gpus())
        sampling = Sampling(
            self._run.path, self._node, has_gpus=self._on_accelerator, ranks=self._where_ranks_are
        )
        sampling.start()
        try:
            done, _ = await asyncio.wait(always, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            sampling.close()
            for task in (*always, gpus):
                task.cancel()
            await self._end_all()
            self._lookout.close()
            self._fork_server.close()
            for node in self._memories:
                remove_snapshots(FOLDER, self._run.path, node=node)

    def _tell_of_leaving(self) -> None:
        """Report SIGTERM: the machine takes this node away. Its workers are to leave in time."""
        message = say.LeaveWanted(with_node=True)
        for number in self._workers:
            self._uplink.report(say.Said(worker=number, generation=0, message=message))

    def _where_ranks_are(self) -> list[RankSample]:
        """The phase of every rank that has one: a parked process may have none any more."""
        places, found = self._lookout.places(), []
        for each in list(self._workers.values()):
            phase, step = places.get(each.number, (Phase.PARKED, 0))
            if each.rank is not None and phase != Phase.PARKED:
                found.append(RankSample(each.rank, phase.words, step))
        return found

    async def _outlive(self) -> None:
        """Returns when no controller was there for the lease, and the workers have stopped."""
        await self._uplink.lose()
        self.is_orphaned = True
        await self._stop_gently()

    async def _obey(self, order: say.ToAgent) -> None:
        match order:
            case say.StartWorker():
                await self._start(order)
            case say.Tell():
                worker = self._workers.get(order.worker)
                if worker is not None:
                    if isinstance(order.message, say.Join):
                        worker.rank, worker.waits = order.message.rank, False
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
                await self._let_exit()

    async def _watch(self) -> None:
        """Tell of workers that have stood still for too long."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for found in self._lookout.late():
                self._uplink.report(say.Stuck(seen=found))

    async def _watch_gpus(self) -> None:
        """Report settings that harm, and what the driver reports of GPUs, where these are used."""
        if not self._on_accelerator:
            return
        if self._node == 0:  # nodes whose settings differ are found before the run
            for name, setting in undone(os.environ).items():
                self._note(
                    f"{name}={os.environ[name]} undoes recovery over NCCL: {setting.otherwise}; "
                    f"unset {name}, and agents set {setting.value}"
                )
        why: object
        try:
            why = health = await asyncio.to_thread(open_health, self._node)
            while not isinstance(health, str):
                for change in await asyncio.to_thread(health.changes):
                    self._uplink.report(say.ForRecord(event=change))
                await asyncio.sleep(EVERY_S)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task
            why = f"{type(error).__name__}: {error}"
        self._note(f"node {self._node}: the health of GPUs is not watched: {why}")

    def _note(self, text: str) -> None:
        self._uplink.report(say.ForRecord(event=Noted(text=text)))

    async def _look_closer(self) -> None:
        """Tell what is to be seen of every worker; a late one's log gets it too."""
        # Tracebacks first: faulthandler reads the frames of all threads without the interpreter's
        # lock, and the thread that reports collectives would run meanwhile; workers died of it.
        all_found = await self._lookout.look_closer()
        for each in self._workers.values():
            each.collectives = None
            each.channel.write(say.encode(say.ReportCollectives()))
        deadline = time.monotonic() + STACKS_WAIT_S
        asked = {found.worker for found in all_found if found.kind in ("waiting", "looping")}
        while time.monotonic() < deadline and any(
            each.collectives is None for each in self._workers.values() if each.number in asked
        ):
            await asyncio.sleep(0.01)
        for found in all_found:
            worker = self._workers.get(found.worker)
            if worker is None:
                continue
            self._uplink.report(msgspec.structs.replace(found, collectives=worker.collectives))
            if found.is_late:
                with worker.log.open("ab") as log:
                    place = where(found.phase, found.step)
                    log.write(f"--- stuck in {place}\n{found.stacks}\n".encode())

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
        self._uplink.report(
            say.FaultDone(
                worker=order.worker,
                pid=pid,
                fault=order.fault,
                monotonic_s=now,
                machine=machine(),
            )
        )
        if fault.row.maker == "worker":
            worker.channel.write(say.encode(say.Fire(fault=order.fault)))
            return
        pids = [each.process.pid for each in self._workers.values()]
        task = asyncio.create_task(
            carry_out(fault, pid, pids, self._run.checkpoints, fork_server=self._fork_server.pid)
        )
        self._injections.add(task)
        task.add_done_callback(self._injections.discard)
        if fault.kind == "disconnect":
            self._uplink.disconnect()

    async def _start(self, order: say.StartWorker) -> None:
        ours, theirs = socket.socketpair()
        slot = create_slot(order.worker)
        logs = self._run
        path = logs.spare_log(order.worker) if order.rank is None else logs.rank_log(order.rank)
        with path.open("ab") as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- worker {order.worker}, {stamp}\n".encode())
            log.flush()
            process = self._fork_server.start(
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
        worker = _Worker(order.worker, process, writer, listening, path, order.rank)
        self._workers[order.worker] = worker
        task = asyncio.create_task(self._follow(worker, slot))
        self._exits.add(task)
        task.add_done_callback(self._exits.discard)

    def _place_of(self, rank: int | None) -> dict[str, str]:
        """The place of a worker, by the names that torch reads. A spare learns its rank when it
        joins."""
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
                if isinstance(word.message, say.Collectives):
                    self._workers[number].collectives = word.message.groups
                    continue
                self._uplink.report(
                    say.Said(worker=number, generation=word.generation, message=word.message)
                )
                if isinstance(word.message, _WAITS_AFTER):
                    self._workers[number].waits = True
                    if self._stops:
                        self._let_go(self._workers[number])

    async def _follow(self, worker: _Worker, slot: SlotFile) -> None:
        """Report a worker's birth, and its exit the moment it is known of."""
        pid = await worker.process.born()
        if pid:
            self._lookout.add(worker.number, pid, slot)
            self._uplink.report(say.Started(worker=worker.number, pid=pid))
        returncode = await worker.process.wait()
        if not pid and returncode > 0:
            self._report_no_start(worker.number, returncode)
        self._lookout.drop(worker.number)
        # Last words first. A grandchild may hold the channel open, so do not wait long for its end.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(worker.reader, timeout=0.2)
        worker.process.end_group()  # what it started ends with it
        worker.channel.close()
        del self._workers[worker.number]
        self._uplink.report(
            say.Exited(
                worker=worker.number,
                pid=pid,
                returncode=returncode,
                fenced=worker.fenced,
                out_of_memory=self._is_out_of_memory(worker, returncode),
            )
        )

    def _report_no_start(self, worker: int, returncode: int) -> None:
        """A worker that was never born as its fork server failed: that is no fault of the
        hardware."""
        message, log = self._fork_server.last_words(returncode)
        crash = say.Crashed(
            kind="StartError",
            message=message,
            where=log,
            retry=True,
            parks=False,
            step=None,
            samples=[],
            exit_code=RunError.exit_code,
        )
        self._uplink.report(say.Said(worker=worker, generation=0, message=crash))

    def _is_out_of_memory(self, worker: _Worker, returncode: int) -> bool:
        """Whether a SIGKILL that nobody here sent came with one more of the kernel's."""
        kills = num_oom_kills()
        before, self._oom_kills = self._oom_kills, kills
        if returncode != -signal.SIGKILL or worker.fenced or None in (kills, before):
            return False
        return kills != before

    async def _let_exit(self) -> None:
        for worker in self._workers.values():
            self._let_go(worker)
        if self._exits:
            await asyncio.wait(self._exits, timeout=5)

    def _let_go(self, worker: _Worker) -> None:
        worker.channel.write(say.encode(say.Exit()))

    async def _stop_gently(self) -> None:
        """The controller is gone: let the workers reach a step boundary and save."""
        self._stops = True
        for worker in self._workers.values():
            worker.channel.write(say.encode(say.StopAtBoundary()))
            if worker.waits:
                self._let_go(worker)
        if self._exits:
            await asyncio.wait(self._exits, timeout=self._grace_s)

    async def _end_all(self) -> None:
        for worker in list(self._workers.values()):
            worker.fenced = True
            worker.process.kill()
        if self._exits:
            await asyncio.wait(self._exits, timeout=5)


_WAITS_AFTER = (say.Parked, say.Completed, say.PeerLost, say.Crashed)
"""Messages after which a worker waits for an order."""


def main() -> int:
    """Entry point of the agent's process; its exit code."""
    parser = argparse.ArgumentParser(prog="paceline-agent", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--node", type=int, required=True, help="this node, from 0")
    parser.add_argument(
        "--controller", required=True, help="host:port of the controller, an IPv6 host in brackets"
    )
    parser.add_argument("--host", help="what this machine is called where it was started from")
    parser.add_argument("--token-stdin", action="store_true", help="read the secret from there")
    parser.add_argument("--hold", action="store_true", help="hold the run: no lock was inherited")
    options = parser.parse_args()
    controller = split_address(options.controller)
    # Ctrl-C in a terminal reaches the controller, which decides; the agent only obeys.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_open_files()
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if options.token_stdin:
        token = sys.stdin.readline().strip()
    run = open_run(options.run)
    held = hold_agents(run.path) if options.hold else None
    agent = Agent(run=run, node=options.node, controller=controller, token=token)
    try:
        asyncio.run(agent.serve())
    finally:
        if held is not None:
            held.close()
    return ORPHANED if agent.is_orphaned else 0


if __name__ == "__main__":
    sys.exit(main())
