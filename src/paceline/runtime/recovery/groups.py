"""The process groups of one generation: meet, and get out of them whatever waits inside.

Nothing in torch frees a gloo collective whose peer is gone: `abort` and `shutdown` return, and the
collective waits for its time limit; ranks that are no neighbours of the lost one hear nothing at
all (measured, torch 2.13). Shutting down the sockets of the groups does, within milliseconds: every
operation on them, now or later, raises, but for one in the middle of a message, of which DDP's
all-reduces can be broken off (`strategy/data/sums.py`). NCCL has `abort`.

Leaves out: which ranks there are (the controller says), and the meshes on top.
"""

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # where dist has them from, typed

from paceline.control.messages import Join
from paceline.runtime.devices import is_accelerator
from paceline.runtime.strategy.data.sums import break_off, take_broken_off

_STORE_TIMEOUT = timedelta(seconds=300)
"""For a key that another rank has to write; torch's default."""

_TRY_TIMEOUT = timedelta(seconds=1)
"""For one try to reach the store. torch waits some more before it gives up (2.5 s in all,
measured), which is part of what a worker may take to leave a generation: `control/losing.py`."""

_LOOK_S = 0.02
"""Between two looks whether the store is there at all."""

_LEFT_S = 0.1
"""For operations whose sockets were shut to raise, before they count as asleep for good. They do
within milliseconds (measured)."""

_Sockets = dict[int, int]
"""File descriptor -> inode, which tells a socket from a later one with the same descriptor."""


class Interrupted(Exception):
    """This generation is over; another one follows."""


class Groups:
    """The process groups of this worker, from generation to generation."""

    def __init__(self, *, backend: str, listener: socket.socket) -> None:
        """
        Args:
            backend: As for `init_process_group`.
            listener: Where the rendezvous store is served; taken over.
        """
        self.address: tuple[str, int] = listener.getsockname()[:2]
        """Of the store that this process serves, whether or not anybody comes."""

        self._backend = backend
        host, port = self.address
        self._server = TCPStore(
            host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._store: TCPStore | None = None
        self._generation = 0
        self._interrupted = self._aborted = 0
        self._sockets: _Sockets = {}
        self._before: _Sockets | None = None
        self._lock = threading.Lock()

    def join(self, order: Join) -> None:
        """Form the default group of a generation. Collective.

        Raises:
            Interrupted: Before all had met, the generation was given up.
        """
        self._generation = order.generation
        with self.opening():
            self._store = self._find_store(order)
            prefix = PrefixStore(f"generation-{order.generation}", self._store)
            hook = sys.excepthook  # torch wraps it each time, to print a rank before each line
            dist.init_process_group(
                self._backend, store=prefix, rank=order.rank, world_size=order.world_size
            )
            sys.excepthook = hook

    def _find_store(self, order: Join) -> TCPStore:
        """A connection to the generation's store.

        Who serves it may have died meanwhile: torch would try for the whole time limit, in a call
        that nothing frees, and this worker would be taken for stuck and lose its state.

        Raises:
            Interrupted: It was not found before the generation was given up.
        """
        deadline = time.monotonic() + _STORE_TIMEOUT.total_seconds()
        while True:
            while not _answers(order.host, order.port) and time.monotonic() < deadline:
                with self._lock:
                    if self._is_interrupted:
                        raise Interrupted
                time.sleep(_LOOK_S)
            try:
                store = TCPStore(order.host, order.port, None, False, _TRY_TIMEOUT)
            except RuntimeError:
                with self._lock:
                    if self._is_interrupted:
                        raise Interrupted from None
                if time.monotonic() >= deadline:
                    raise
                continue
            store.set_timeout(_STORE_TIMEOUT)
            return store

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around whatever makes process groups: their sockets are the ones that an interruption
        shuts down.

        Raises:
            Interrupted: Afterwards, when an interruption came meanwhile.
        """
        with self._lock:
            self._before = _tcp_sockets()
        try:
            yield
        finally:
            with self._lock:
                self._sockets |= self._opened()
                self._before = None
                if self._is_aborted:
                    _shut_down(self._sockets)
        if self._is_interrupted:
            raise Interrupted

    def interrupt(self, generation: int) -> None:
        """This generation is over: nothing that comes over its groups counts from now on. Whatever
        waits in them goes on waiting, until `abort`."""
        self._interrupted = max(self._interrupted, generation)

    def abort(self, generation: int) -> None:
        """Make every operation of this generation's groups end, in whatever thread it waits."""
        self.interrupt(generation)
        with self._lock:
            self._aborted = max(self._aborted, generation)
            if self._is_aborted:
                _shut_down(self._sockets | self._opened())
                _abort_nccl()
                break_off(Interrupted("this generation is over"))

    def leave(self) -> None:
        """Destroy the groups, so that others can be made under the same names."""
        with self._lock:
            self._interrupted = self._aborted = max(self._interrupted, self._generation)
            _shut_down(self._sockets)
            self._sockets = {}
        break_off(Interrupted("this generation is over"))
        _outlive(take_broken_off())
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch names the default group by a count that only destroying one resets. Where a meeting
        # broke off there was none to destroy, and the others would wait for this rank under a name
        # that it does not use (torch 2.13, `_process_group_name`).
        dist.distributed_c10d._world.group_count = 0
        self._store = None

    @property
    def _is_interrupted(self) -> bool:
        return self._interrupted >= self._generation > 0

    @property
    def _is_aborted(self) -> bool:
        return self._aborted >= self._generation > 0

    def _opened(self) -> _Sockets:
        """Since `opening` began. What others opened to the store that is served here is theirs."""
        if self._before is None:
            return {}
        found = _tcp_sockets(but_port=self.address[1])
        return {fd: inode for fd, inode in found.items() if self._before.get(fd) != inode}


def listen_for_store(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A socket for the store, on this host only: given a host, TCPStore listens to all of them.

    Args:
        port: 0 for any that is free.

    Raises:
        OSError: It is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.listen(4096)
    return listener


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), timeout=_TRY_TIMEOUT.total_seconds()).close()
    except OSError:
        return False
    return True


def _tcp_sockets(*, but_port: int | None = None) -> _Sockets:
    """The connected TCP sockets of this process, but those accepted at one port."""
    found: _Sockets = {}
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        fd = int(name)
        with _borrowed(fd) as each:
            if each is not None and not (but_port and each.getsockname()[1] == but_port):
                found[fd] = os.fstat(fd).st_ino
    return found


def _shut_down(sockets: _Sockets) -> None:
    for fd, inode in sockets.items():
        with _borrowed(fd) as each:
            if each is not None and os.fstat(fd).st_ino == inode:
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """A connected TCP socket by its descriptor, which is left open; None for anything else. A
    socket that breaks meanwhile is as good as closed.

    Listening ones are none: gloo's thread ends the process when its listener is shut down.
    """
    try:
        copy = socket.socket(fileno=os.dup(fd)) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
    except OSError:  # closed meanwhile
        copy = None
    if copy is None:
        yield None
        return
    try:
        is_tcp = (
            copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        )
        is_listening = is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        yield copy if is_tcp and not is_listening else None
    except OSError:
        pass
    finally:
        copy.close()


def _outlive(works: list[dist.Work]) -> None:
    """Keep the groups until gloo has ended these: destroying a group waits for its threads. Only
    those whose sockets were shut in the middle of a message are left by now, some threads and
    descriptors each, until the group's time limit."""
    deadline = time.monotonic() + _LEFT_S
    while (left := [work for work in works if not work.is_completed()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(_LEFT_S / 20)
    if not left:
        return

    def keep(groups: list[dist.ProcessGroup]) -> None:
        for work in left:
            with suppress(RuntimeError):
                work.wait()

    groups = list(dist.distributed_c10d._world.pg_map)
    threading.Thread(target=keep, args=(groups,), name="paceline-left", daemon=True).start()


def _abort_nccl() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            if is_accelerator(device):
                group._get_backend(device).abort()
