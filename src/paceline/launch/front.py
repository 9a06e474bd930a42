"""The front of a run: it shows how far the run is, and starts the controller again when that dies.

The controller is a fork of this process. What it has to say comes through a socket pair; signals go
to it. When it is killed the next one takes over; when the front itself is killed, the kernel kills
the controller too, and `paceline run --resume` takes over.

Leaves out: being a process of its own where forking is not safe (everywhere but Linux). There the
controller is this process, and nothing is started again.
"""

import contextlib
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Protocol

from paceline.control.controller import Progress
from paceline.control.parent import die_with_parent
from paceline.control.state import State
from paceline.errors import Problem, RunError
from paceline.record.events import AnyEvent

MOST_WAITING = 10_000
"""News of progress that wait to be shown, before more is not shown at all."""

SHORT_LIFE_S = 5.0
MOST_SHORT_LIVES = 5
"""Controllers in a row that were killed so soon, after which no other is started. A guess."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Serve(Protocol):
    """Controls a run to its end."""

    def __call__(
        self,
        takes_over: bool,
        on_event: Callable[[AnyEvent], None],
        on_progress: Callable[[Progress], None],
    ) -> State: ...


def supervise(
    serve: Serve,
    *,
    takes_over: bool,
    on_event: Callable[[AnyEvent], None],
    on_progress: Callable[[Progress], None],
) -> State:
    """How the run ended.

    Args:
        serve: Called in another process, and again in a new one when that was killed.
        takes_over: Whether the first call goes on where a controller of before died.

    Raises:
        RunError: Controllers are killed again and again.
        Exception: What `serve` raised.
    """
    if sys.platform != "linux":
        return serve(takes_over, on_event, on_progress)
    show = {"event": on_event, "progress": on_progress}
    short_lives = 0
    with _Signals() as signals:
        while True:
            began_s = time.monotonic()
            pid, line = _start(serve, takes_over)
            signals.send_to(pid)
            end = None
            try:
                for kind, value in _heard(line):
                    if kind in show:
                        show[kind](value)  # type: ignore[operator]
                    else:
                        end = kind, value
            except BaseException:
                os.kill(pid, signal.SIGTERM)
                raise
            finally:
                line.close()
                signals.send_to(None)
                _, status = os.waitpid(pid, 0)
            if end is not None:
                kind, value = end
                if isinstance(value, BaseException):
                    raise value
                assert isinstance(value, State)
                return value
            takes_over = True
            lived_s = time.monotonic() - began_s
            short_lives = short_lives + 1 if lived_s < SHORT_LIFE_S else 0
            if short_lives >= MOST_SHORT_LIVES:
                raise RunError(_killed_again(status))


class _Signals:
    """What this process is sent goes to the controller, or waits for the next one."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._waiting: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> "_Signals":
        for number in _FORWARDED:
            before = signal.getsignal(number)
            if number != signal.SIGHUP or before != signal.SIG_IGN:  # nohup
                self._before[number] = before
                signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def send_to(self, pid: int | None) -> None:
        """From now on they are for this process."""
        self._pid = pid
        while pid is not None and self._waiting:
            os.kill(pid, self._waiting.pop(0))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._pid is None:
            self._waiting.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)


def _start(serve: Serve, takes_over: bool) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    # The child has its own handlers before it hears of a signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_controller(serve, takes_over, theirs, parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    theirs.close()
    return pid, ours


def _be_controller(serve: Serve, takes_over: bool, line: socket.socket, parent: int) -> NoReturn:
    """The child's life. It leaves nothing of its parent's undone: what that has open stays so."""
    code = 1
    try:
        os.setsid()  # Ctrl-C in the terminal is for the front, which passes it on
        die_with_parent(parent)
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        told = _Told(line)
        try:
            state = serve(takes_over, told.event, told.progress)
            told.end("end", state)
        except Exception as error:  # noqa: BLE001 - raised again by the front
            told.end("error", error)
        code = 0
    finally:
        os._exit(code)


class _Told:
    """The controller's side of the line; it never waits for whoever shows it."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="paceline-front", daemon=True)
        self._thread.start()

    def event(self, event: AnyEvent) -> None:
        self._queue.put(pickle.dumps(("event", event)))

    def progress(self, progress: Progress) -> None:
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(pickle.dumps(("progress", progress)))

    def end(self, kind: str, value: object) -> None:
        """The last word; returns once all is said."""
        try:
            content = pickle.dumps((kind, value))
            pickle.loads(content)
        except Exception:  # noqa: BLE001 - an error with parts that cannot be sent
            content = pickle.dumps((kind, RuntimeError(repr(value))))
        self._queue.put(content)
        self._queue.put(None)
        self._thread.join()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the front is gone, and this process ends with it
            while (content := self._queue.get()) is not None:
                self._line.sendall(content)


def _heard(line: socket.socket) -> Iterator[tuple[str, object]]:
    with line.makefile("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return  # it ended, maybe in the middle of a word


def _killed_again(status: int) -> Problem:
    number = os.waitstatus_to_exitcode(status)
    return Problem(
        code="R044",
        what=f"the run's controller ended with {number} {MOST_SHORT_LIVES} times, each within "
        f"{SHORT_LIFE_S:.0f} s",
        where="controller",
        fix="see who kills it (the kernel, for want of memory?); the workers save and stop after "
        "recovery.lease, then resume the run",
    )
