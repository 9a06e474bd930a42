"""A worker's line to its agent: messages out at once, orders in when they are asked for."""

import select
import socket
import threading
from typing import assert_never

from paceline.control import messages as say


class Channel:
    """The worker's end of the socket pair it inherited."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._unread = b""
        self._rendezvous: say.Rendezvous | None = None
        self._stop = False
        self._closed = False
        self._sending = threading.Lock()

    def send(self, message: say.FromWorker) -> None:
        """Send now, from any thread. A lost agent is not this worker's end: the kernel sees to
        that."""
        try:
            with self._sending:
                self._socket.sendall(say.encode(message))
        except OSError:
            self._closed = True

    def wait_for_rendezvous(self) -> say.Rendezvous:
        """Block until told where to meet."""
        while self._rendezvous is None:
            self._read(timeout_s=None)
            if self._closed:
                raise ConnectionError("the agent closed the channel before the rendezvous")
        return self._rendezvous

    def ask_to_stop(self) -> None:
        """As if the agent had asked: for signals to this process."""
        self._stop = True

    @property
    def stop_wanted(self) -> bool:
        """Whether somebody asked to stop at the next step boundary; never blocks."""
        self._read(timeout_s=0.0)
        return self._stop or self._closed

    def _read(self, timeout_s: float | None) -> None:
        while not self._closed:
            ready, _, _ = select.select([self._socket], [], [], timeout_s)
            if not ready:
                return
            received = self._socket.recv(65536)
            if not received:
                self._closed = True
            *lines, self._unread = (self._unread + received).split(b"\n")
            for line in lines:
                self._take(say.to_worker(line))
            if timeout_s is None:
                return

    def _take(self, message: say.ToWorker) -> None:
        match message:
            case say.Rendezvous():
                self._rendezvous = message
            case say.StopAtBoundary():
                self._stop = True
            case _:
                assert_never(message)
