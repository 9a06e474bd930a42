"""One command on each node, all at the same time: a line goes in, a line comes back.

Whatever leads to a node at the job's place leads there now too, so that limits, environment and
containers are those that its ranks will have. Nothing stays behind on a node: what is started there
ends with this process, or when its time is over.

Leaves out what is asked (`gather.py`, `measure.py`) and agents, which stay (`hosts.py`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Protocol, TypeVar

import msgspec

from paceline.topology.node.messages import ANSWER, Call, Look, Start, Take

_T = TypeVar("_T")

MOST_AT_ONCE = 32
"""Hosts whose agents are seen to at the same time. A guess: a host on the way there takes ten whom
it does not know yet."""

_MODULE = "paceline.topology.node"


class Way(Protocol):
    """How to get to a host."""

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """What to run here so that these words, each one argument, run there."""

    def is_unreached(self, returncode: int) -> bool:
        """Whether that ended so because nobody got there."""

    def python(self, module: str, *words: str) -> list[str]:
        """A module of ours, run by the hosts' Python."""

    @property
    def patience_s(self) -> float:
        """How long a visit may take: to get there, and to import little."""

    @property
    def minds_end(self) -> bool:
        """Whether what runs there sees the end of its input."""


@dataclass(frozen=True, slots=True)
class Here:
    """The way to this machine: none."""

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        return list(words)

    def is_unreached(self, returncode: int) -> bool:
        return False

    def python(self, module: str, *words: str) -> list[str]:
        return [sys.executable, "-m", module, *words]

    @property
    def patience_s(self) -> float:
        return 0.0

    @property
    def minds_end(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a job, and how to get there."""

    place: str
    names: tuple[str, ...]
    way: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Why a node has not answered."""

    why: str
    is_unreached: bool
    """Whether nobody got there; else something there could not answer."""


class Visit:
    """One command on one node: a line in, a line out, and it may go on after that."""

    def __init__(
        self, nodes: Nodes, name: str, what: str, question: Look | Call | Start | Take
    ) -> None:
        self.name = name
        self.word = question.word if isinstance(question, Look) else ""
        self.is_here = nodes.place == "local"
        self.began_s = 0.0
        self.answered_s = 0.0
        self._nodes = nodes
        self._what = what
        self._line = msgspec.json.encode(question) + b"\n"
        self._process: subprocess.Popen[bytes] | None = None
        self._answer: bytes | None = None
        self._is_given_up = False

    def ask(self, kind: type[_T], limit_s: float) -> _T | Silence:
        """Its answer, or why there is none."""
        way = self._nodes.way
        command = way.command(self.name, way.python(_MODULE, self._what))
        self.began_s = time.time()
        with tempfile.TemporaryFile() as said:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    start_new_session=True,
                )
            except OSError as error:
                why = f"{command[0]} cannot be started: {error.strerror}"
                return Silence(why=why, is_unreached=True)
            if self._is_given_up:  # while it was being started
                self._kill(self._process)
            self._tell(self._process)
            reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            reader.start()
            reader.join(limit_s)
            self.answered_s = time.time()
            if self._answer is None:
                return self._why(reader.is_alive(), said, limit_s)
        try:
            return msgspec.json.decode(self._answer, type=kind)
        except msgspec.DecodeError:
            why = "it has another Paceline, whose answer is not understood"
            return Silence(why=why, is_unreached=False)

    def end(self) -> None:
        """What was started there ends."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        if self._is_given_up:
            self._kill(process)
        try:
            process.wait(timeout=2.0 if self._nodes.way.minds_end else 0.0)
        except subprocess.TimeoutExpired:
            self._kill(process)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_given_up = True
        if self._process is not None:
            self._kill(self._process)

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own, see `ask`

    def _tell(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            process.stdin.write(self._line)
            process.stdin.flush()
            if self._what in ("call", "take") or not self._nodes.way.minds_end:
                process.stdin.close()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed by `end`
            for line in process.stdout:
                if line.startswith(ANSWER.encode()):
                    self._answer = line.removeprefix(ANSWER.encode())
                    return

    def _why(self, is_silent: bool, said: IO[bytes], limit_s: float) -> Silence:
        if is_silent:
            return Silence(why=f"nothing was heard for {limit_s:.0f} s", is_unreached=True)
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        code = self._process.returncode
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip()[:300] if lines else f"exit code {code}"
        if "No module named" in last and "paceline" in last:
            return Silence(why=f"Paceline is not installed there: {last}", is_unreached=False)
        return Silence(why=last, is_unreached=self._nodes.way.is_unreached(code))


def ask_each(visits: Sequence[Visit], kind: type[_T], limit_s: float) -> dict[str, _T | Silence]:
    """The answer of each, by its node's name; then what was started there ends."""
    try:
        heard = ask_all(visits, lambda visit: visit.ask(kind, limit_s))
    finally:
        ask_all(visits, Visit.end)
    return {visit.name: found for visit, found in zip(visits, heard, strict=True)}


def ask_all(visits: Sequence[Visit], act: Callable[[Visit], _T]) -> list[_T]:
    """What each comes to, in order. Ctrl-C gives all of them up at once."""
    pool = ThreadPoolExecutor(max(1, min(len(visits), 4 * MOST_AT_ONCE)))
    try:
        return list(pool.map(act, visits))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for visit in visits:
            visit.give_up()
        raise
    finally:
        pool.shutdown(wait=True)
