"""The process that writes a rank's share of each checkpoint, beside the one that trains.

    python -m paceline.runtime.checkpoint.writer --socket FD --parent PID

Started at the first save and kept; a thread would take the interpreter lock from training. It does
without torch: importing that takes 2.5 s of a core and 250 MB for each rank (measured, torch 2.13),
and all it would do here is put the frame of a record around values (`_frames.py`). It talks
to its own worker alone, and with the other ranks' writers only by the files that each leaves in the
checkpoint's folder, so that no death of another hangs it. It ends with its worker, however that
ends.

torch has the like (`AsyncCheckpointerType.PROCESS`). Its daemons meet in a process group of their
own over a TCP store: the death of one rank leaves the others waiting there for its time-out, and
they can be neither told to stop nor used again after it.
"""

import argparse
import contextlib
import mmap
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from paceline.control.parent import die_with_parent
from paceline.errors import PacelineError
from paceline.record.checkpoints import list_checkpoints
from paceline.record.events import CheckpointCopied, CheckpointCopyFailed
from paceline.record.remote import Remote
from paceline.runtime.checkpoint._files import (
    Abandoned,
    CopyPolicy,
    WriteError,
    publish_part,
    remove_unfinished,
    seal,
    wait_for_parts,
    write_part,
)
from paceline.runtime.checkpoint._reason import plain_reason
from paceline.runtime.checkpoint._shared_memory import map_memory
from paceline.runtime.checkpoint._writer_messages import WANTED, Ended, GoOn, Memory, Phase, Write

NICENESS = 10
"""Training comes first where both want a core. A guess: a tenth of its weight (sched(7))."""


class Writer:
    """The process's side of the conversation."""

    def __init__(self, channel: socket.socket, wanted: mmap.mmap) -> None:
        self._channel = channel
        self._talk = Connection(os.dup(channel.fileno()))
        self._wanted = wanted
        self._memory: mmap.mmap | None = None
        self._overtaken: Write | None = None
        self._copier = _Copier(self._send)
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Write what is asked until the worker is gone."""
        with contextlib.suppress(EOFError, ConnectionError):
            asked: Write | None = None
            while True:
                asked = asked or self._next_write()
                ended, asked = self._write(asked), self._overtaken
                self._overtaken = None
                self._send(ended)

    def _send(self, message: Ended | Phase | CheckpointCopied | CheckpointCopyFailed) -> None:
        with self._sending:  # copies are told of by a thread of their own
            self._talk.send(message)

    def _next_write(self) -> Write:
        while True:
            message = self._hear()
            if isinstance(message, Write):
                return message

    def _hear(self) -> Write | GoOn:
        while True:
            message: Memory | Write | GoOn = self._talk.recv()
            if not isinstance(message, Memory):
                return message
            _, (descriptor,), _, _ = socket.recv_fds(self._channel, 1, 1)
            self._memory = map_memory(descriptor, message.num_bytes)
            os.close(descriptor)

    def _write(self, asked: Write) -> Ended:
        task = asked.task
        try:
            self._check_wanted(asked)
            part = write_part(task, asked.records, lambda index: self._values(asked, index))
            self._check_wanted(asked)
            if asked.has_phase:
                self._pass_phase(asked.number)
            publish_part(task, part)
            if task.rank != 0:
                return Ended(asked.number)
            wait_for_parts(task, lambda: self._check_wanted(asked))
            num_bytes = seal(task, asked.metadata)
            if task.copy_to is not None:
                self._copier.copy(task.folder, task.copy_to, task.manifest.step)
            return Ended(asked.number, num_bytes=num_bytes)
        except WriteError as failed:
            ended = Ended(asked.number, reason=failed.reason, is_space=failed.is_space)
        except Abandoned:
            ended = Ended(asked.number, reason="abandoned")
        if task.rank == 0:
            remove_unfinished(task)
        return ended

    def _pass_phase(self, number: int) -> None:
        self._send(Phase(number))
        while True:
            answer = self._hear()
            if isinstance(answer, Write):  # the worker went on without an answer
                self._overtaken = answer
                raise Abandoned
            if answer.number == number:
                if answer.reason is not None:
                    raise WriteError(answer.reason)
                return

    def _values(self, asked: Write, index: int) -> memoryview:
        num_bytes, start = asked.records[index].num_bytes, asked.starts[index]
        if num_bytes == 0:
            return memoryview(b"")
        assert self._memory is not None, "memory comes before the first values"
        return memoryview(self._memory)[start : start + num_bytes]

    def _check_wanted(self, asked: Write) -> None:
        if WANTED.unpack_from(self._wanted)[0] != asked.number:
            raise Abandoned


class _Copier:
    """Copies to another storage what a folder has and the storage has not, one folder after the
    other, by a thread of this process."""

    def __init__(self, tell: Callable[[CheckpointCopied | CheckpointCopyFailed], None]) -> None:
        self._tell = tell
        self._asked: queue.SimpleQueue[tuple[Path, CopyPolicy, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._remote: Remote | None = None

    def copy(self, folder: Path, policy: CopyPolicy, step: int) -> None:
        """Have the newest checkpoints of a folder copied; `tell` hears of every one, and of what
        became of this step at the end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-copy", daemon=True)
            self._thread.start()
        self._asked.put((folder, policy, step))

    def _run(self) -> None:
        while True:
            folder, policy, step = self._asked.get()
            try:
                self._bring_up_to_date(folder, policy, step)
            except Exception as error:  # noqa: BLE001 - every storage has its own
                told = error.problems[0].what if isinstance(error, PacelineError) else None
                with contextlib.suppress(OSError):  # the worker is gone
                    self._tell(CheckpointCopyFailed(step=step, reason=told or plain_reason(error)))

    def _bring_up_to_date(self, folder: Path, policy: CopyPolicy, step: int) -> None:
        """An earlier step that failed is tried again here, before this one."""
        if self._remote is None or self._remote.url != policy.url.rstrip("/"):
            self._remote = Remote(policy.url)
        there = {copy.name for copy in self._remote.copies() if copy.manifest is not None}
        here = [e for e in list_checkpoints(folder) if e.is_complete][: policy.keep]
        for entry in sorted(here, key=lambda entry: entry.step):
            if entry.step > step or (entry.path.name in there and entry.step != step):
                continue
            self._tell(self._remote.upload(entry.path, policy.compress))
        self._remote.prune(policy.keep)


def main() -> None:
    parser = argparse.ArgumentParser(prog="paceline-writer", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the channel")
    parser.add_argument("--wanted", type=int, required=True, help="descriptor of shared memory")
    parser.add_argument("--parent", type=int, required=True, help="process id of the worker")
    options = parser.parse_args()
    die_with_parent(options.parent)
    # A terminal's Ctrl-C and an agent's SIGTERM are for the worker, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    with socket.socket(fileno=options.socket) as channel:
        wanted = map_memory(options.wanted, mmap.PAGESIZE)
        Writer(channel, wanted).serve()


if __name__ == "__main__":
    main()
