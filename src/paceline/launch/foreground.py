"""The front of a run: it shows how far the run is, and starts the controller again when that dies.

The controller is a fork of this process. What it has to say comes through a socket pair; signals go
to it. When it is killed the next one takes over, and so it is when it hangs: it beats from the loop
in which it decides, and is killed when it falls silent. When the front itself is killed, the kernel
kills the controller too, and `paceline run --resume` takes over.

Leaves out: being a process of its own where forking is not safe (everywhere but Linux). There the
controller is this process, and nothing is started again.
"""

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal, NoReturn, Protocol

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

SILENT_SHARE = 2 / 3
"""Share of the lease, after which a silent controller is killed: the next one has the rest to be
heard by the agents. A guess."""

LEAST_SILENT_S = 2.0
"""However short the lease is: five beats. A guess."""

LOOK_AGAIN_S = 1.0
"""The last of a silence. Who was stopped together with the controller, or is on a machine that
stood still, sees its own clock jump and hears a beat within this. A guess: two beats."""

PATIENCE_ASKED_TWICE_S = 3.0
"""Silence after the second signal, before all is ended by force. A guess: seven beats."""

_POLL_S = 0.25

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Serve(Protocol):
    """Controls a run to its end."""

    def __call__(
        self,
        takes_over: bool,
        on_event: Callable[[AnyEvent], None],
        on_progress: Callable[[Progress], None],
        on_beat: Callable[[bool], None],
    ) -> State: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Force:
    """What is done about a controller that does not answer."""

    lease_s: float
    """Lease of the agents: they stop their workers when they have heard no controller for so
    long."""

    end_agents: Callable[[], None]
    """Ends the run's agents and with them its workers; returns when they are gone."""


def supervise(
    serve: Serve,
    *,
    takes_over: bool,
    on_event: Callable[[AnyEvent], None],
    on_progress: Callable[[Progress], None],
    on_note: Callable[[str], None],
    force: Force,
) -> State:
    """How the run ended.

    Args:
        serve: Called in another process, and again in a new one when that was killed.
        takes_over: Whether the first call goes on where a controller of before died.
        on_note: Told what a person should know of what is done here.

    Raises:
        RunError: Controllers are killed again and again.
        KeyboardInterrupt: Asked to stop twice, and the controller did not answer: all is ended.
        Exception: What `serve` raised.
    """
    if sys.platform != "linux":
        return serve(takes_over, on_event, on_progress, lambda goes_on: None)
    show = {"event": on_event, "progress": on_progress}
    short_lives = 0
    with _Signals() as signals:
        while True:
            began_s = time.monotonic()
            pid, line = _start(serve, takes_over)
            signals.send_to(pid)
            end, silence = None, _Silence(force.lease_s, signals)
            try:
                for kind, value in _heard(line, silence):
                    if kind in show:
                        show[kind](value)  # type: ignore[operator]
                    else:
                        end = kind, value
                if silence.verdict is not None:
                    os.kill(pid, signal.SIGKILL)
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
            if silence.verdict == "end":
                on_note("asked twice, and the controller did not answer: all is ended by force")
                force.end_agents()
                raise KeyboardInterrupt
            takes_over = True
            lived_s = time.monotonic() - began_s
            if silence.verdict == "replace":
                lived_s -= silence.lasted_s
                signals.send_again(after_s=silence.began_s)
                on_note(
                    f"the controller did not answer for {silence.lasted_s:.0f} s and was killed; "
                    "the next one takes over"
                )
            short_lives = short_lives + 1 if lived_s < SHORT_LIFE_S else 0
            if short_lives >= MOST_SHORT_LIVES:
                raise RunError(_killed_again(status))


class _Silence:
    """How long a controller has said nothing, and what follows."""

    def __init__(self, lease_s: float, signals: "_Signals") -> None:
        self._limit_s = max(LEAST_SILENT_S, SILENT_SHARE * lease_s)
        self._signals = signals
        self._is_watched = False
        self._looks_again_since_s: float | None = None
        self.began_s = time.monotonic()
        self.verdict: Literal["end", "replace"] | None = None

    def heard(self) -> None:
        self.began_s, self._looks_again_since_s = time.monotonic(), None

    def beats(self, goes_on: bool) -> None:
        """Watched from its first beat to its last: reading a journal may take its time."""
        self._is_watched = goes_on

    def is_too_long(self) -> bool:
        """Asked often, when there was nothing to hear; `verdict` is what to do then."""
        now_s, asked_s = time.monotonic(), self._signals.asked_twice_s
        if asked_s is not None and now_s - max(asked_s, self.began_s) > PATIENCE_ASKED_TWICE_S:
            self.verdict = "end"
        elif self._is_watched and now_s - self.began_s > self._limit_s - LOOK_AGAIN_S:
            self._looks_again_since_s = self._looks_again_since_s or now_s
            if now_s - self._looks_again_since_s > LOOK_AGAIN_S:
                self.verdict = "replace"
        return self.verdict is not None

    @property
    def lasted_s(self) -> float:
        """Until now."""
        return time.monotonic() - self.began_s


class _Signals:
    """What this process is sent goes to the controller, or waits for the next one."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._waiting: list[int] = []
        self._sent: list[tuple[float, int]] = []
        self.asked_twice_s: float | None = None
        """When the second one came (monotonic)."""

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

    def send_again(self, *, after_s: float) -> None:
        """To the next one, what came after that moment: who was asked cannot have heard it."""
        self._waiting += [number for at_s, number in self._sent if at_s > after_s]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._sent and self.asked_twice_s is None:
            self.asked_twice_s = now_s
        self._sent.append((now_s, number))
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
            state = serve(takes_over, told.event, told.progress, told.beat)
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

    def beat(self, goes_on: bool) -> None:
        """Called by the loop that decides, so that none comes when that hangs."""
        self._queue.put(pickle.dumps(("beat", goes_on)))

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
                self._line.sendall(_LENGTH.pack(len(content)) + content)


def _heard(line: socket.socket, silence: _Silence) -> Iterator[tuple[str, object]]:
    """What a controller says, to its end or until its silence is too long."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    buffer = bytearray()
    while True:
        if not poll.poll(1000 * _POLL_S):
            if silence.is_too_long():
                return
            continue
        try:
            content = line.recv(_CHUNK_BYTES)
        except ConnectionError:
            return
        if not content:
            return  # it ended, maybe in the middle of a word
        silence.heard()
        buffer += content
        for kind, value in _words(buffer):
            if kind == "beat":
                silence.beats(bool(value))
            else:
                yield kind, value


_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 16


def _words(buffer: bytearray) -> Iterator[tuple[str, object]]:
    """The whole ones, which are taken out."""
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        word: tuple[str, object] = pickle.loads(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield word


def _killed_again(status: int) -> Problem:
    number = os.waitstatus_to_exitcode(status)
    return Problem(
        code="R044",
        what=f"the run's controller ended with {number} {MOST_SHORT_LIVES} times, each within "
        f"{SHORT_LIFE_S:.0f} s",
        where="controller",
        fix="find out what kills it (the kernel, out of memory?); the workers save and stop after "
        "recovery.lease, then resume the run",
    )
