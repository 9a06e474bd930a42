"""A worker's side of its writer process: started at the first save, warm afterwards, one at most.

The training thread copies a share and goes on; nothing here waits for the process but `wait`. Two
threads of the worker talk to it, and both sleep while nothing is said.
"""

import contextlib
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from paceline.record.events import CheckpointCopied, CheckpointCopyFailed
from paceline.runtime.checkpoint._files import WriteTask
from paceline.runtime.checkpoint._reason import plain_reason
from paceline.runtime.checkpoint._save_plan import SavePlan
from paceline.runtime.checkpoint._shared_memory import make_memory, map_memory
from paceline.runtime.checkpoint._staging import Stage
from paceline.runtime.checkpoint._writer_messages import (
    NOTHING,
    WANTED,
    Ended,
    GoOn,
    Memory,
    Phase,
    Write,
)

OnPhase = Callable[[str], object]
"""Called with `writing` between the data files and the commit; a drill strikes there."""


_LOOK_S = 0.02
"""Between two looks at what is being copied. A guess: short beside a transfer."""


class Pending:
    """One save that was handed to the process."""

    def __init__(self, number: int, task: WriteTask, on_phase: OnPhase | None) -> None:
        self.number = number
        self.step = task.manifest.step
        self.is_copied = task.rank == 0 and task.copy_to is not None
        self.on_phase = on_phase
        self.ended: Ended | None = None
        self.ended_at = 0.0
        self._event = threading.Event()

    def end(self, ended: Ended) -> None:
        self.ended, self.ended_at = ended, time.perf_counter()
        self._event.set()

    def wait(self, limit_s: float) -> bool:
        """Whether it ended within that time."""
        return self._event.wait(limit_s)


class WriterProcess:
    """The writer process of this worker, and the memory that shares are copied to."""

    def __init__(self) -> None:
        self._stage = Stage()
        self._number = NOTHING
        self._link: _Link | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process that runs; None before the first save and after its end."""
        return self._link.process.pid if self._link is not None and self._link.is_open else None

    def submit(self, task: WriteTask, plan: SavePlan, on_phase: OnPhase | None) -> Pending:
        """Copy a share and have it written. Earlier saves must have ended or been abandoned."""
        before: list[CheckpointCopied | CheckpointCopyFailed] = []
        if self._link is None or not self._link.is_open:
            before = self.take_copies()
            self._link = _Link()
        for told in before:
            self._link.copies.append(told)
        starts = self._stage.copy(plan.share)
        self._number += 1
        pending = Pending(self._number, task, on_phase)
        write = Write(
            number=self._number,
            task=task,
            records=plan.share.records,
            starts=starts,
            metadata=plan.metadata,
            has_phase=on_phase is not None,
        )
        self._link.send(pending, write, self._stage)
        return pending

    def take_copies(self) -> list[CheckpointCopied | CheckpointCopyFailed]:
        """What became of copies since it was last asked."""
        copies = self._link.copies if self._link is not None else deque()
        return [copies.popleft() for _ in range(len(copies))]

    def wait_for_copies(self) -> None:
        """Return once nothing is being copied, or nobody is left who could."""
        while self._link is not None and self._link.is_open and self._link.uncopied:
            time.sleep(_LOOK_S)

    def abandon(self) -> None:
        """Have what is on its way given up, at once: nothing is said and nobody waited for."""
        if self._link is not None:
            self._link.want(NOTHING)

    def kill(self) -> None:
        """End the process; what was on its way has failed. The next save starts another."""
        if self._link is not None:
            self._link.process.kill()


_of_process: tuple[int, WriterProcess] | None = None


def writer_process() -> WriterProcess:
    """The one of this process; a forked child has another than its parent."""
    global _of_process
    if _of_process is None or _of_process[0] != os.getpid():
        _of_process = os.getpid(), WriterProcess()
    return _of_process[1]


class _Link:
    """A process that was started, and the threads that talk to it.

    The kernel ends the process with the thread that started it (`die_with_parent`), so the first
    save must come from a thread that lives as long as the worker: its main one.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._pending: dict[int, Pending] = {}
        self._told: tuple[int | None, int] = None, 0
        self.copies: deque[CheckpointCopied | CheckpointCopyFailed] = deque()
        self.uncopied: set[int] = set()
        self._outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        descriptor = make_memory("paceline-wanted", mmap.PAGESIZE)
        self._wanted = map_memory(descriptor, mmap.PAGESIZE)
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, "-m", "paceline.runtime.checkpoint.writer"]
        command += ["--socket", str(theirs.fileno()), "--wanted", str(descriptor)]
        command += ["--parent", str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), descriptor),
                env=dict(os.environ),
            )
        os.close(descriptor)
        self._talk = Connection(os.dup(self._channel.fileno()))
        for name, run in (("send", self._send_all), ("hear", self._hear_all)):
            threading.Thread(target=run, name=f"paceline-writer-{name}", daemon=True).start()

    def send(self, pending: Pending, write: Write, stage: Stage) -> None:
        self._pending[pending.number] = pending
        self.want(pending.number)
        # Larger memory may well have the number of the descriptor that was closed for it.
        if stage.fd is not None and (stage.fd, stage.num_bytes) != self._told:
            self._told, fd = (stage.fd, stage.num_bytes), os.dup(stage.fd)
            self._outbox.put(lambda: self._send_memory(fd, stage.num_bytes))
        self._outbox.put(lambda: self._talk.send(write))
        if not self.is_open:  # it ended meanwhile, and who hears had not seen this save
            self._end_all()

    def want(self, number: int) -> None:
        WANTED.pack_into(self._wanted, 0, number)

    def _send_memory(self, fd: int, num_bytes: int) -> None:
        self._talk.send(Memory(num_bytes))
        socket.send_fds(self._channel, [b"m"], [fd])
        os.close(fd)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):
            while self.is_open:
                self._outbox.get()()

    def _hear_all(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                match self._talk.recv():
                    case Phase(number):
                        threading.Thread(
                            target=self._pass_phase, args=(number,), daemon=True
                        ).start()
                    case CheckpointCopied() | CheckpointCopyFailed() as told:
                        self.copies.append(told)
                        self.uncopied.discard(told.step)
                    case Ended() as ended:
                        pending = self._pending.pop(ended.number, None)
                        if pending is not None:
                            if pending.is_copied and ended.reason is None:
                                self.uncopied.add(pending.step)
                            pending.end(ended)
        for step in sorted(self.uncopied):
            self.copies.append(
                CheckpointCopyFailed(step=step, reason="the process that copies it ended")
            )
        self.uncopied.clear()
        self.is_open = False
        self._outbox.put(lambda: None)  # wakes who sends, which ends
        self._end_all()
        self._channel.close()

    def _end_all(self) -> None:
        reason = f"the process that writes it ended {_how(self.process.wait())}"
        for number in list(self._pending):
            pending = self._pending.pop(number, None)
            if pending is not None:
                pending.end(Ended(number, reason=reason))

    def _pass_phase(self, number: int) -> None:
        reason = None
        pending = self._pending.get(number)
        try:
            if pending is not None and pending.on_phase is not None:
                pending.on_phase("writing")
        except Exception as error:  # noqa: BLE001 - the edge of the thread; the save fails of it
            reason = plain_reason(error)
        self._outbox.put(lambda: self._talk.send(GoOn(number, reason)))


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"with exit code {returncode}"
    return f"by {signal.Signals(-returncode).name}"
