"""Agents on other hosts, whatever way leads there: start, end, and whether they have ended.

Nothing here waits for a network in the controller's own loop: each node has a thread that does what
it is told, one thing after the other. A host that cannot be reached loses its node to a spare host,
where there is one; its old agent ends when its lease is over, and until then the controller gives
the node's ranks to nobody.
"""

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO

import paceline
from paceline.control.controller import AgentAddress
from paceline.control.host_agents import GONE, LIVES
from paceline.errors import JobError, Problem
from paceline.launch.gather import gather, left_note
from paceline.launch.node_commands import MOST_AT_ONCE, Nodes, Way
from paceline.launch.places import LATER, Inspection, Start
from paceline.record.placement import Placement, read_placement, write_placement
from paceline.record.run import RunFolder
from paceline.record.snapshot_files import FOLDER, remove_snapshots
from paceline.topology.node.facts import NodeAnswer, Question

LOOK_EVERY_S = 1.0
"""Between two questions whether an agent is gone. A guess: a question costs a new connection."""

END_S = 10.0
"""How long agents have to leave at the end of a run, before they are ended."""

CLOCK_S = 5.0
"""Difference of clocks that is worth a word: events of one run are sorted by them. A guess."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of one run: those of its nodes, in their order, and then the spares."""

    run: RunFolder
    names: tuple[str, ...]
    num_nodes: int
    way: Way
    place: str

    def visit(self, host: str, *words: str) -> "subprocess.CompletedProcess[str]":
        """A visit to its end.

        Raises:
            OSError: The command for it cannot be started.
            TimeoutExpired: It took too long.
        """
        inside = self.way.python(
            "paceline.control.host_agents", "--run", str(self.run.path), *words
        )
        return subprocess.run(
            self.way.command(host, inside),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.way.patience_s,
            check=False,
        )

    def is_gone(self, node: int, host: str, pid: int, *, end: bool) -> bool | None:
        """Whether an agent has ended, maybe by force; None when nobody can tell.

        Args:
            node: -1 for those of all nodes.
        """
        words = ["--agent", str(node), "--host", host, "--pid", str(pid)]
        try:
            done = self.visit(host, *words, *(["--end"] if end else []))
        except (OSError, subprocess.TimeoutExpired):
            return None
        return {GONE: True, LIVES: False}.get(done.returncode)

    def end_all(self) -> None:
        """End every agent of the run on every host that can be reached."""
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            list(pool.map(lambda host: self.is_gone(-1, host, 0, end=True), self.names))
        if FOLDER.is_dir():
            remove_snapshots(FOLDER, self.run.path)


def check_hosts(
    hosts: Hosts, on_note: Callable[[str], None], inspection: Inspection | None = None
) -> None:
    """Look at every host before anything is started there.

    Args:
        inspection: What else is looked at on the same visit.

    Raises:
        JobError: `W004`, one is not reached; `W005`, it does not see the run's folder; `W006`, it
            has another Paceline, or none; and what the inspection says of the others.
    """
    question = inspection.question if inspection is not None else Question(is_quick=True)
    question = replace(question, folders=(str(hosts.run.path), *question.folders))
    nodes = Nodes(place=hosts.place, names=hosts.names, way=hosts.way)
    calls = inspection is not None and inspection.calls
    with left_note(question) as (asked, note):
        gathered = gather(nodes, asked, limit_s=hosts.way.patience_s, calls=calls)
    wrong = {each.name: _problem(hosts, each, note) for each in gathered.nodes}
    problems = [each for each in wrong.values() if each is not None]
    if inspection is not None:
        able = tuple(each for each in gathered.nodes if wrong[each.name] is None)
        problems += inspection.judge(replace(gathered, nodes=able), note)
    if problems:
        raise JobError(*problems)
    for each in gathered.nodes:
        if each.ahead_s is not None and abs(each.ahead_s) > CLOCK_S:
            on_note(
                f"the clock of {each.name} is {abs(each.ahead_s):.0f} s "
                f"{'ahead of' if each.ahead_s > 0 else 'behind'} this machine's"
            )


def _problem(hosts: Hosts, answer: NodeAnswer, note: str | None) -> Problem | None:
    host, facts = answer.name, answer.facts
    if facts is None and answer.is_unreached:
        return _unreached(host, answer.why_not or "it did not answer")
    if facts is None:
        return Problem(
            code="W006",
            what=f"{host} cannot run Paceline: {answer.why_not}",
            where=f"host {host}",
            fix="install Paceline there at the same path as here, or say where Python is "
            f"({hosts.place}.python)",
        )
    folder = facts.folders[0]
    if note is not None and folder.note != note:
        return Problem(
            code="W005",
            what=f"{host} does not see the run's folder"
            + ("" if folder.note is None else ": it has another one of that name"),
            where=str(hosts.run.path),
            fix="put the run (--out or --runs) on a file system that all hosts share, at one path",
        )
    if folder.why_not is not None:
        return Problem(
            code="W005",
            what=f"{host} cannot write into the run's folder: {folder.why_not}",
            where=str(hosts.run.path),
            fix="let the user that runs there write to it",
        )
    if facts.packages["paceline"] != paceline.__version__:
        return Problem(
            code="W006",
            what=f"{host} has Paceline {facts.packages['paceline']}, this is "
            f"{paceline.__version__}",
            where=f"host {host}",
            fix="install the same version on every host",
        )
    return None


def _unreached(host: str, why: str) -> Problem:
    return Problem(
        code="W004",
        what=f"{host} cannot be reached: {why}",
        where=f"host {host}",
        fix="check that it is up and that ssh logs in without a prompt, or take it out of the list",
    )


class HostAgents:
    """The agents of one controller on these hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        before = read_placement(hosts.run.path)
        known = before.hosts if before is not None and before.place == hosts.place else {}
        self._placement = before if before is not None else Placement(place=hosts.place)
        self._host_of = {
            node: known[node] if known.get(node) in hosts.names else hosts.names[node]
            for node in range(hosts.num_nodes)
        }
        self._lock = threading.Lock()
        self._unreached: set[str] = set()
        self._gone: set[tuple[int, int]] = set()
        self._asked_s: dict[tuple[int, int], float] = {}
        self._asking: set[tuple[int, int]] = set()
        self._clients: list[tuple[int, str, subprocess.Popen[bytes]]] = []
        self._tasks: dict[int, queue.SimpleQueue[Callable[[], None]]] = {}
        self._ends = False

    def start(self, address: AgentAddress) -> None:
        """On the node's host, or where that is lost on a spare one."""
        self._do(address.node, lambda: self._start(address))

    def kill(self, node: int, pid: int) -> None:
        """As soon as its host hears of it."""
        self._do(node, lambda: self._kill(node, pid))

    def is_gone(self, node: int, pid: int) -> bool:
        """Whether its host has said so; asks, and has the answer the next time."""
        with self._lock:
            if (node, pid) in self._gone:
                return True
            now_s = time.monotonic()
            if now_s - self._asked_s.get((node, pid), -LOOK_EVERY_S) < LOOK_EVERY_S:
                return False
            if (node, pid) in self._asking:  # a slow way: one question after the other
                return False
            self._asked_s[(node, pid)] = now_s
            self._asking.add((node, pid))
            host = self._host_of[node]

        def ask() -> None:
            gone = self._hosts.is_gone(node, host, pid, end=False)
            with self._lock:
                self._asking.discard((node, pid))
                if gone:
                    self._gone.add((node, pid))

        threading.Thread(target=ask, name="paceline-is-gone", daemon=True).start()
        return False

    @property
    def kills_surely(self) -> bool:
        """A host may be out of reach, and its agent alive."""
        return False

    def end(self) -> None:
        self._ends = True
        deadline = time.monotonic() + END_S
        for _, _, client in self._clients:
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(timeout=max(0.0, deadline - time.monotonic()))
        left = [each for each in self._clients if each[2].poll() is None]
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            list(pool.map(lambda it: self._hosts.is_gone(it[0], it[1], 0, end=True), left))
        for _, _, client in left:
            client.kill()
            client.wait()

    def _do(self, node: int, task: Callable[[], None]) -> None:
        if node not in self._tasks:
            self._tasks[node] = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(self._tasks[node],), name=f"paceline-{node}", daemon=True
            ).start()
        self._tasks[node].put(task)

    def _work(self, tasks: "queue.SimpleQueue[Callable[[], None]]") -> None:
        while True:
            task = tasks.get()
            if not self._ends:
                task()

    def _kill(self, node: int, pid: int) -> None:
        host = self._host_of[node]
        gone = self._hosts.is_gone(node, host, pid, end=True)
        with self._lock:
            if gone:
                self._gone.add((node, pid))
                self._unreached.discard(host)
            elif gone is None:
                self._unreached.add(host)

    def _start(self, address: AgentAddress) -> None:
        for host in self._candidates(address.node):
            self._move(address.node, host)
            if self._started(address, host):
                return
            with self._lock:
                self._unreached.add(host)

    def _candidates(self, node: int) -> Iterator[str]:
        """The node's own host, and then each spare that is free, while they are not reached."""
        own = self._host_of[node]
        if own not in self._unreached:
            yield own
        for host in self._hosts.names:
            if host not in self._host_of.values() and host not in self._unreached:
                yield host
        yield own  # it may be back

    def _move(self, node: int, host: str) -> None:
        with self._lock:
            self._host_of[node] = host
            self._placement = replace(self._placement, hosts=dict(sorted(self._host_of.items())))
            write_placement(self._hosts.run.path, self._placement)

    def _started(self, address: AgentAddress, host: str) -> bool:
        """Whether somebody got there; the command goes on as long as the agent."""
        way = self._hosts.way
        command = agent_command(way, self._hosts.run, address.node, host, address.controller)
        with (self._hosts.run.logs / f"agent-{address.node}.log").open("ab") as log:
            log.write(f"--- on {host}\n".encode())
            log.flush()
            client = _spawn(command, address.token, log)
        self._clients.append((address.node, host, client))
        deadline = time.monotonic() + way.patience_s
        while time.monotonic() < deadline and self._tasks[address.node].empty():
            with contextlib.suppress(subprocess.TimeoutExpired):
                return not way.is_unreached(client.wait(timeout=0.2))
        return True


def agent_command(way: Way, run: RunFolder, node: int, host: str, controller: str) -> list[str]:
    """What to run here so that the agent of a node runs on a host."""
    words = way.python(
        "paceline.control.agent",
        *("--run", str(run.path), "--node", str(node), "--host", host),
        *("--controller", controller, "--token-stdin", "--hold"),
    )
    return way.command(host, words)


def starts_of(way: Way, run: RunFolder, names: Sequence[str]) -> list[Start]:
    """The agents of nodes on these hosts, for a dry run."""
    return [
        Start(host=host, command=agent_command(way, run, node, host, LATER))
        for node, host in enumerate(names)
    ]


def _spawn(command: Sequence[str], token: str, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    client = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Its own session: Ctrl-C in the terminal is for the controller alone.
        start_new_session=True,
    )
    assert client.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why in the log
        client.stdin.write(f"{token}\n".encode())
        client.stdin.close()
    return client


@dataclass(frozen=True, slots=True)
class HostSite:
    """The hosts of one run, and this machine's address as they reach it."""

    hosts: Hosts
    address: str

    def agents(self, lock: IO[bytes]) -> HostAgents:
        """Each holds the run itself."""
        return HostAgents(self.hosts)

    def end_by_force(self) -> None:
        """By SIGKILL on every host that is reached."""
        self.hosts.end_all()
