"""Workers' processes, quickly: one process imports everything once, and every worker is its fork.

Importing PyTorch takes seconds of a core; a fork takes milliseconds. So a new worker is ready
almost at once, and keeping warm spares costs little. The fork server itself
(`runtime/fork_server.py`) computes nothing and has no threads, which is what makes forking it safe.
Where forking is not safe at all (everywhere but Linux), a worker is a process of its own from the
start.

The fork server dies with its agent, and the workers die with the fork server: the kernel kills
them, as it does at a parent's end. The next worker begins another fork server.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

MODULE_VARIABLE = "PACELINE_FORK_SERVER"
"""Names the module that is run as an agent's fork server, in the agent's environment. The tests'
own
puts the workers on another device first."""

MAX_BYTES = 1 << 16
"""Bytes of one request or answer: a few paths and numbers."""


_LAST_LINES = 20
"""Lines of the fork server's log, shown when it fails."""

_LEAVE_S = 0.5
"""How long the fork server may take to end by itself once its line is closed. A guess: it does
nothing else then."""


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a worker. Its channel, its slot and its log come along as file descriptors."""

    worker: int
    arguments: list[str]
    environment: dict[str, str]
    """Beyond that of the fork server."""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """A worker was born, or has ended."""

    worker: int
    pid: int
    returncode: int | None
    """As in `subprocess`; None while it lives."""


class Child:
    """A worker's process."""

    def __init__(self) -> None:
        self.pid = 0
        """0 before its birth."""

        self.returncode: int | None = None

        self._born = asyncio.Event()
        self._ended = asyncio.Event()
        self._is_doomed = False

    def kill(self) -> None:
        """SIGKILL to its whole process group, as soon as there is one."""
        self._is_doomed = True
        if self.returncode is None:
            self.end_group()

    def end_group(self) -> None:
        """SIGKILL to whatever is left of its process group."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def born(self) -> int:
        """Its process id, once it has one; 0 when it never will."""
        await self._born.wait()
        return self.pid

    async def wait(self) -> int:
        """Its exit status, once it has ended and is reaped."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def hear(self, news: News) -> None:
        """What became of it."""
        self.pid = self.pid or news.pid
        self._born.set()
        if self._is_doomed:
            self.kill()
        if news.returncode is not None and self.returncode is None:
            self.returncode = news.returncode
            self._ended.set()


class ForkServer:
    """The processes of one agent's workers."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment = dict(environment)
        self._log = log
        self._module = self._environment.get(MODULE_VARIABLE, "paceline.runtime.fork_server")
        self._forks = sys.platform == "linux"
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._children: dict[int, Child] = {}
        self._waiting: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """Process id of the fork server itself; None where there is none, now or ever."""
        return self._process.pid if self._process is not None else None

    def open(self) -> None:
        """Begin to import, so that the first worker need not wait for it later."""
        if not self._forks or self._line is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", self._module),
                    *("--line", str(theirs.fileno()), "--agent", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=self._environment,
            )
        theirs.close()
        self._line = ours
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def start(
        self,
        worker: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        channel: socket.socket,
        slot: int,
        log: IO[bytes],
    ) -> Child:
        """A worker's process, in a process group of its own. It is told where its channel and its
        slot are."""
        child = Child()
        self._children[worker] = child
        if self._forks:
            self.open()
            birth = Birth(worker=worker, arguments=list(arguments), environment=dict(environment))
            self._send(msgspec.json.encode(birth), [channel.fileno(), slot, log.fileno()])
        else:
            self._spawn(child, worker, arguments, environment, channel=channel, slot=slot, log=log)
        return child

    def close(self) -> None:
        """End the fork server; workers that still live end with it."""
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line)
            self._line.close()
            self._line = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LEAVE_S)
            self._process.kill()
            self._process.wait()
            self._process = None

    def last_words(self, returncode: int) -> tuple[str, str]:
        """How the fork server ended, in a line, and the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        ended = f"`python -m {self._module}`, which starts the workers, exited with {returncode}"
        return f"{ended}: {lines[-1]}" if lines else ended, "\n".join(lines)

    def _send(self, content: bytes, descriptors: list[int]) -> None:
        assert self._line is not None
        try:
            socket.send_fds(self._line, [content], descriptors)
        except OSError:
            self._lose_all()

    def _hear(self) -> None:
        assert self._line is not None
        try:
            content = self._line.recv(MAX_BYTES)
        except OSError:
            content = b""
        if not content:
            self._lose_all()
            return
        news = msgspec.json.decode(content, type=News)
        child = self._children.get(news.worker)
        if child is None:
            return
        child.hear(news)
        if news.returncode is not None:
            del self._children[news.worker]

    def _lose_all(self) -> None:
        """The fork server is gone, and with it every worker; those to be born get its exit
        status."""
        process = self._process
        self.close()
        ended = process.returncode if process is not None else -signal.SIGKILL
        for worker, child in self._children.items():
            returncode = -signal.SIGKILL if child.pid else ended
            child.hear(News(worker=worker, pid=child.pid, returncode=returncode))
        self._children.clear()

    def _spawn(
        self,
        child: Child,
        worker: int,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        channel: socket.socket,
        slot: int,
        log: IO[bytes],
    ) -> None:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "paceline.runtime.worker", *arguments),
                *("--parent", str(os.getpid()), "--channel", str(channel.fileno())),
                *("--slot", str(slot)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[channel.fileno(), slot],
            process_group=0,
            env=self._environment | dict(environment),
        )
        child.hear(News(worker=worker, pid=process.pid, returncode=None))

        async def wait() -> None:
            returncode = await asyncio.to_thread(process.wait)
            child.hear(News(worker=worker, pid=process.pid, returncode=returncode))

        task = asyncio.create_task(wait())
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
