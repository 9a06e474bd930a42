"""A worker's line to its agent: messages out at once, orders in by a thread of their own."""

import contextlib
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Protocol, assert_never

from paceline.control import messages as say


class Line(Protocol):
    """What a rank reports over, and is asked to stop by."""

    @property
    def stop_wanted(self) -> bool:
        """Whether the run is to stop at the next step boundary."""

    @property
    def regroup_wanted(self) -> say.RegroupAtBoundary | None:
        """The order to leave this generation at a step boundary; None without one."""

    @property
    def save_wanted(self) -> bool:
        """Whether a checkpoint is to be saved at the next step boundary."""

    def forget_save(self) -> None:
        """All ranks have agreed to save: nothing is asked for any more."""

    def send(self, message: say.FromWorker) -> None:
        """Report this, from any thread."""

    def wait_for_fire(self, fault: str) -> bool:
        """Block until a drill's fault may happen; False if it shall not."""


class NoAgent:
    """The line of a rank that no agent has started: nobody listens, or asks for anything."""

    stop_wanted = False
    regroup_wanted = None
    save_wanted = False

    def forget_save(self) -> None:
        pass

    def send(self, message: say.FromWorker) -> None:
        pass

    def wait_for_fire(self, fault: str) -> bool:
        return False


class Channel:
    """The worker's end of the socket pair it inherited."""

    def __init__(self, fd: int) -> None:
        self.generation = 0
        """What this worker takes part in; 0 before its first."""

        self.on_interrupt: Callable[[int], None] = lambda generation: None
        """Called at once, in the thread that listens, with a generation that is over. What it sets
        is set before the answer goes out."""

        self.on_abort: Callable[[int], None] = lambda generation: None
        """Called in that thread with a generation whose groups are to be left. Must not block."""

        self.collectives: Callable[[], dict[str, say.At]] = dict
        self.after_report: Callable[[], object] = lambda: None
        """How far this worker is in each of its process groups. Asked in a thread of its own:
        torch's recorder asks the device, whose driver may block."""

        self.leaves_at_once = False
        """Whether an interruption is the abort as well. Over gloo a rank's abort raises at the
        others and completes nothing, so nobody has to wait until all have answered."""

        self._socket = socket.socket(fileno=fd)
        self._joins: list[say.Join] = []
        self._fires: list[str] = []
        self._interrupted = self._aborted = 0
        self._regroup: say.RegroupAtBoundary | None = None
        self._stop = self._save = self._exit = self._closed = False
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._listening = threading.Thread(target=self._listen, name="paceline-agent", daemon=True)
        self._reporting: threading.Thread | None = None

    def open(self) -> None:
        self._listening.start()

    def send(self, message: say.FromWorker) -> None:
        """Send now, from any thread. A lost agent is not this worker's end: the kernel sees to
        that."""
        word = say.Word(generation=self.generation, message=message)
        try:
            with self._sending:
                self._socket.sendall(say.encode(word))
        except OSError:
            self._closed = True

    def wait_for_join(self) -> say.Join:
        """Block until told to take a rank in a later generation, and be in it."""
        with self._news:
            self._news.wait_for(lambda: self._joins or self._exit or self._closed)
            if not self._joins:
                raise SystemExit(0)
            order = self._joins.pop()
            self._joins.clear()
        self.generation = order.generation
        return order

    def wait_for_exit(self) -> bool:
        """Block until the run is over, True, or this generation is to be left, False."""
        with self._news:
            self._news.wait_for(lambda: self._exit or self._closed or self.is_interrupted)
            return not self.is_interrupted

    def wait_for_abort(self) -> None:
        """Block until this generation's groups may be left: every rank knows that it is over, or
        nobody is there any more to say so.

        Raises:
            SystemExit: The run is over.
        """
        with self._news:
            self._news.wait_for(
                lambda: self._aborted >= self.generation or self._exit or self._closed
            )
            if self._exit:
                raise SystemExit(0)

    @property
    def is_interrupted(self) -> bool:
        """Whether this generation is over."""
        return self._interrupted >= self.generation > 0

    def wait_for_interrupt(self, timeout_s: float) -> bool:
        """Whether this generation is to be left, after some patience."""
        with self._news:
            return self._news.wait_for(lambda: self.is_interrupted, timeout_s)

    def wait_for_fire(self, fault: str) -> bool:
        """Block until a drill's fault is due, True, or this generation is to be left, False."""
        with self._news:
            self._news.wait_for(lambda: fault in self._fires or self._closed or self.is_interrupted)
            if fault not in self._fires:
                return False
            self._fires.remove(fault)
            return True

    def ask_to_stop(self) -> None:
        """Stop as if the agent had asked: for signals to this process."""
        self._stop = True

    @property
    def stop_wanted(self) -> bool:
        """Whether somebody asked to stop at the next step boundary; never blocks."""
        return self._stop or self._closed

    @property
    def regroup_wanted(self) -> say.RegroupAtBoundary | None:
        """The order to leave this generation at the next step boundary, if there is one."""
        order = self._regroup
        return order if order is not None and order.generation == self.generation else None

    @property
    def save_wanted(self) -> bool:
        """Whether somebody asked for a checkpoint; never blocks."""
        return self._save

    def forget_save(self) -> None:
        self._save = False

    def _listen(self) -> None:
        unread = b""
        while True:
            try:
                received = self._socket.recv(65536)
            except OSError:
                received = b""
            if not received:
                break
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                self._take(say.to_worker(line))
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _take(self, message: say.ToWorker) -> None:
        with self._news:
            match message:
                case say.Join():
                    self._joins.append(message)
                case say.Interrupt(generation=generation):
                    self._interrupted = max(self._interrupted, generation)
                    _survive(self.on_interrupt, generation)
                    if self.leaves_at_once:
                        self._aborted = max(self._aborted, generation)
                case say.Abort(generation=generation):
                    self._interrupted = max(self._interrupted, generation)
                    self._aborted = max(self._aborted, generation)
                case say.RegroupAtBoundary():
                    self._regroup = message
                case say.SaveAtBoundary():
                    self._save = True
                case say.StopAtBoundary():
                    self._stop = True
                case say.Exit():
                    self._exit = True
                case say.Fire(fault=fault):
                    self._fires.append(fault)
                case say.ReportCollectives():
                    pass
                case _:
                    assert_never(message)
            self._news.notify_all()
        if isinstance(message, say.Abort) or (
            isinstance(message, say.Interrupt) and self.leaves_at_once
        ):
            _survive(self.on_abort, message.generation)
        if isinstance(message, say.Interrupt):
            self.send(say.Heard(generation=message.generation))
        elif isinstance(message, say.ReportCollectives):
            self._begin_report()

    def _begin_report(self) -> None:
        if self._reporting is None or not self._reporting.is_alive():
            self._reporting = threading.Thread(
                target=_survive, args=(self._report_collectives, self.generation), daemon=True
            )
            self._reporting.start()

    def _report_collectives(self, generation: int) -> None:
        groups = self.collectives()
        if generation == self.generation:
            self.send(say.Collectives(groups=groups))
            self.after_report()


def _survive(call: Callable[[int], None], generation: int) -> None:
    """This thread hears every later order, so no error of what is called here may end it."""
    try:
        call(generation)
    except Exception:  # noqa: BLE001 - the edge of the thread; the log has it
        with contextlib.suppress(OSError):
            traceback.print_exc()
