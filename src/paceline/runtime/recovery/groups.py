"""The process groups of one generation: meet, and get out of them whatever waits inside.

Nothing in torch frees a gloo collective whose peer is gone: `abort` and `shutdown` return, and the
collective waits for its time limit; ranks that are no neighbours of the lost one hear nothing at
all (measured, torch 2.13). Shutting down the sockets of the groups does, within milliseconds: every
operation on them, now or later, raises, but for one in the middle of a message, of which DDP's
all-reduces can be broken off (`strategy/data/gloo_all_reduce.py`). NCCL has `abort`.

Leaves out: which ranks there are (the controller says), and the meshes on top.
"""

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.control.environment import undone
from paceline.control.messages import At, Join
from paceline.control.network import bound_socket
from paceline.runtime._torch_private import (
    Backend,
    ErrorType,
    PrefixStore,
    TCPStore,
    all_groups,
    backends_of,
    forget_group_count,
    number_ranks,
    set_time_limit,
)
from paceline.runtime.devices import is_accelerator, synchronize
from paceline.runtime.recovery.sequence import collectives, keep_dump
from paceline.runtime.strategy.data.gloo_all_reduce import break_off, take_broken_off

_STORE_TIMEOUT = timedelta(seconds=300)
"""For a key that another rank has to write; torch's default."""

_TRY_TIMEOUT = timedelta(seconds=1)
"""For one try to reach the store. torch waits some more before it gives up (2.5 s in all,
measured), which is part of what a worker may take to leave a generation:
`control/worker_loss.py`."""

_LOOK_S = 0.02
"""Between two looks whether the store is there at all."""

_LEFT_S = 0.1
"""For operations whose sockets were shut to raise, before they count as asleep for good. They do
within milliseconds (measured)."""

_ABORT_S = 60.0
"""For all groups to abort, after the time that a call may hold the lock that an abort takes, before
this process ends itself. A guess: the controller ends it sooner (`control/interrupting.py`), and
this is for a worker that it cannot reach."""

_ASK_S = 1.0
"""Between two looks at what torch's watchdogs have noted: 12 us for the 8 groups of a mesh of three
axes on a CPU, which the training thread does not see."""

_HOST_LIMIT = timedelta(hours=2)
"""For one operation over gloo, which carries what ranks agree on: some wait there while others read
and hash a checkpoint. Twice the 54 minutes that one rank takes for 4.9 TB at 1.5 GB/s. Whoever
hangs is found by its agent long before."""

_Sockets = dict[int, int]
"""File descriptor -> inode, which tells a socket from a later one with the same descriptor."""


class Interrupted(Exception):
    """This generation is over; another one follows."""


class Groups:
    """The process groups of this worker, from generation to generation."""

    def __init__(self, *, backend: str, listener: socket.socket, limit_s: float = 600.0) -> None:
        """Args:
        listener: Where the rendezvous store is served; taken over.
        limit_s: For one operation between accelerators.
        """
        self.address: tuple[str, int] = listener.getsockname()[:2]
        """Port of the store that this process serves, whether or not anybody comes."""

        self._backend = backend
        self._limit = timedelta(seconds=limit_s)
        host, port = self.address
        self._server = TCPStore(
            host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._store: TCPStore | None = None
        self._generation = 0
        self._interrupted = self._aborted = self._reported = 0
        self._sockets: _Sockets = {}
        self._before: _Sockets | None = None
        self._servers: set[int] = set()
        self._store_port = self._since_ns = self._rank = 0
        self._aborting: threading.Thread | None = None
        self._lock = threading.Lock()

    def join(self, order: Join, device: torch.device) -> None:
        """Form the default group of a generation. Collective.

        Raises:
            Interrupted: Before all had met, the generation was given up.
        """
        self._generation, self._store_port = order.generation, order.port
        self._rank, self._since_ns = order.rank, time.time_ns()
        with self.opening():
            self._store = self._find_store(order)
            if order.rank == 0:  # a watchdog of an earlier generation may have left it (torch 2.13)
                self._store.delete_key("exception_dump")
            prefix = PrefixStore(f"generation-{order.generation}", self._store)
            hook = sys.excepthook  # torch wraps it each time, to print a rank before each line
            dist.init_process_group(
                self._backend,
                store=prefix,
                rank=order.rank,
                world_size=order.world_size,
                # Communicators are begun here, and stand while models are built. The first
                # collective of each waits for that (`CONNECT_LIMIT` in `control/environment.py`),
                # and nothing can abort it there.
                device_id=None if self._backend == "gloo" else device,
            )
            sys.excepthook = hook
            number_ranks(all_groups()[0])

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
        """Around whatever makes process groups: their sockets are the ones that an abort shuts
        down, and they get the time limits.

        Raises:
            Interrupted: Before or afterwards, when the generation is over by then.
        """
        if self._is_interrupted:
            raise Interrupted
        with self._lock:
            self._before, self._servers = _tcp_sockets(), _listening_ports()
        try:
            yield
            self._set_limits()
        finally:
            with self._lock:
                self._sockets |= self._opened()
                self._before = None
                if self._is_aborted:
                    _shut_down(self._sockets)
        if self._is_interrupted:
            raise Interrupted

    def collectives(self) -> dict[str, At]:
        """How far this worker is in each group of its generation."""
        return collectives(self._since_ns)

    def keep_dump(self, logs: Path) -> None:
        """Leave in the run's logs how this worker got there."""
        keep_dump(logs, rank=self._rank, generation=self._generation, since_ns=self._since_ns)

    def interrupt(self, generation: int) -> None:
        """This generation is over: nothing that comes over its groups counts from now on. Whatever
        waits in them goes on waiting, until `abort`."""
        self._interrupted = max(self._interrupted, generation)

    def abort(self, generation: int) -> None:
        """Make every operation of this generation's groups end, in whatever thread it waits.

        Returns at once: NCCL's abort may block for as long as its groups' time limit. `leave` waits
        for it, and the process ends when it takes longer than `_ABORT_S`.
        """
        self.interrupt(generation)
        with self._lock:
            is_new, self._aborted = generation > self._aborted, max(self._aborted, generation)
            if is_new and self._is_aborted:
                self._aborting = threading.Thread(
                    target=self._abort, name="paceline-abort", daemon=True
                )
                self._aborting.start()

    def settle(self, device: torch.device) -> None:
        """Wait until the device has done what it was given, and be sure that it was done.

        A collective on an accelerator returns before its data have come. When it is aborted, it
        ends without an error and leaves its buffer as it happens to be: neither a synchronisation
        nor `get_error` tells (torch 2.13). What does is that this generation's flag is set before
        any rank aborts anything. So nothing on the host follows from a device before a settle.

        Raises:
            Interrupted: This generation is over.
            DistBackendError: A connection of a group was lost.
        """
        synchronize(device)
        if self._is_interrupted:
            raise Interrupted("this generation is over")
        errors = _errors() if is_accelerator(device) else []
        if _torch_aborts_none():  # then what took longer than it may has come now
            errors = [error for error in errors if error != ErrorType.TIMEOUT]
        if errors:
            raise dist.DistBackendError(self._words(errors[0]))

    def watch(self, report: Callable[[str], object]) -> None:
        """Begin to look at what torch's watchdogs note of the accelerators' groups. With
        `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` they end nothing, and whoever waits waits for ever."""

        def ask() -> None:
            while True:
                time.sleep(_ASK_S)
                with suppress(RuntimeError):  # of a group that is being left
                    self.report_error(report)

        threading.Thread(target=ask, name="paceline-errors", daemon=True).start()

    def report_error(self, report: Callable[[str], object]) -> None:
        """Report, once in a generation, that a group of it has lost a connection, or that an
        operation takes longer than it may.

        torch's note stays for as long as the group, and hides later ones. So also an operation that
        ended late by itself leads to another generation, which has new groups.
        """
        generation, errors = self._generation, _errors()
        is_over = self._is_interrupted or generation != self._generation
        if errors and not is_over and generation > self._reported:
            self._reported = generation
            report(self._words(errors[0]))

    def _words(self, error: ErrorType) -> str:
        """What `control/error_texts.py` takes for a lost connection."""
        if error == ErrorType.TIMEOUT:
            limit = f"recovery.collective_timeout ({self._limit.total_seconds():g} s)"
            return f"collective operation timeout: one took longer than {limit}"
        return f"the connection was lost: a process group has the error {error.name}"

    def leave(self) -> None:
        """Destroy the groups, so that others can be made under the same names. NCCL waits for its
        peers in that, until `abort`, where one of them has died."""
        with self._lock:
            self._interrupted = max(self._interrupted, self._generation)
            _shut_down(self._sockets)
            self._sockets = {}
        break_off(Interrupted("this generation is over"))
        _outlive(take_broken_off())
        self._wait_for_abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        with self._lock:  # from here on an abort would meet the next generation's groups
            self._aborted = max(self._aborted, self._generation)
        self._wait_for_abort()
        # torch names the default group by a count that only destroying one resets. Where a meeting
        # broke off there was none to destroy, and the others would wait for this rank under a name
        # that it does not use (torch 2.13, `_process_group_name`).
        forget_group_count()
        self._store = None

    def _wait_for_abort(self) -> None:
        with self._lock:
            aborting, self._aborting = self._aborting, None
        if aborting is not None:
            aborting.join()

    def _abort(self) -> None:
        """A thread for each group, so that none waits for another's; gloo has sockets only. What is
        being opened meanwhile is aborted as well."""
        threads: dict[Backend, threading.Thread] = {}
        while True:
            with self._lock:
                sockets, is_opening = self._sockets | self._opened(), self._before is not None
            for backend in _abortable():
                if backend not in threads:
                    threads[backend] = threading.Thread(
                        target=_abort_one, args=[backend], daemon=True
                    )
                    threads[backend].start()
            _shut_down(sockets)
            break_off(Interrupted("this generation is over"))
            if not is_opening:
                break
            time.sleep(_LOOK_S)
        limit_s = self._limit.total_seconds() + _ABORT_S
        deadline = time.monotonic() + limit_s
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads.values()):
            print(f"aborting the process groups took over {limit_s:.0f} s", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)

    def _set_limits(self) -> None:
        for group in all_groups():
            for backend, devices in backends_of(group).items():
                set_time_limit(backend, self._limit if _is_accelerators(devices) else _HOST_LIMIT)

    @property
    def _is_interrupted(self) -> bool:
        return self._interrupted >= self._generation > 0

    @property
    def _is_aborted(self) -> bool:
        return self._aborted >= self._generation > 0

    def _opened(self) -> _Sockets:
        """Sockets of process groups opened since `opening` began."""
        if self._before is None:
            return {}
        found = _tcp_sockets(store_port=self._store_port, servers=self._servers)
        return {fd: inode for fd, inode in found.items() if self._before.get(fd) != inode}


def _errors() -> list[ErrorType]:
    """What torch's watchdogs have noted of the accelerators' groups; gloo has none."""
    asks = (getattr(backend, "get_error", None) for backend in _abortable())
    found = [ask() for ask in asks if ask is not None]
    return [error for error in found if error != ErrorType.SUCCESS]


def _torch_aborts_none() -> bool:
    """Whether torch's watchdogs and waits leave a late operation alone, unless the operator has
    set them otherwise (ProcessGroupNCCL.hpp)."""
    is_set = "TORCH_NCCL_ASYNC_ERROR_HANDLING" in os.environ
    return is_set and not any(setting.is_needed for setting in undone(os.environ).values())


def listen_for_store(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A socket for the store, on this host only: given a host, TCPStore listens to all of them.

    Args:
        port: 0 for any that is free.

    Raises:
        OSError: It is taken.
    """
    listener = bound_socket(host, port)
    listener.listen(4096)
    return listener


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_TRY_TIMEOUT.total_seconds()).close()
    except OSError:
        return False
    return True


def _tcp_sockets(*, store_port: int | None = None, servers: Container[int] = ()) -> _Sockets:
    """The connected TCP sockets of this process.

    Args:
        store_port: Given one, only those of process groups: gloo's, and the connection to the store
            at this port. A program has sockets of its own, and other threads open some meanwhile.
        servers: Ports that the process listened at before: what others opened to them is theirs.
    """
    found: _Sockets = {}
    for fd in _descriptors():
        with _borrowed(fd) as each:
            if each is None or _is_listening(each):
                continue
            if store_port is None or _is_ours(each, store_port, servers):
                found[fd] = os.fstat(fd).st_ino
    return found


def _listening_ports() -> set[int]:
    ports = set()
    for fd in _descriptors():
        with _borrowed(fd) as each:
            if each is not None and _is_listening(each):
                ports.add(each.getsockname()[1])
    return ports


def _descriptors() -> list[int]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return [int(name) for name in os.listdir(folder)]


def _is_listening(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_ours(connected: socket.socket, store_port: int, servers: Container[int]) -> bool:
    """Whether a socket is gloo's, or leads to the store. gloo sets SO_REUSEADDR at both ends (torch
    2.13, gloo's transport/tcp/socket.cc), which neither a client of anything else nor NCCL does;
    what a server accepts has it from the server, and each of gloo's groups is a server of its own.
    """
    if connected.getsockname()[1] in servers:
        return False
    if connected.getpeername()[1] == store_port:
        return True
    return bool(connected.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))


def _shut_down(sockets: _Sockets) -> None:
    for fd, inode in sockets.items():
        with _borrowed(fd) as each:
            # gloo's thread ends the process when its listener is shut down
            if each is not None and not _is_listening(each) and os.fstat(fd).st_ino == inode:
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket | None]:
    """A TCP socket by its descriptor, which is left open; None for anything else. A socket that
    breaks meanwhile is as good as closed."""
    try:
        copy = socket.socket(fileno=os.dup(fd)) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
    except OSError:  # closed meanwhile
        copy = None
    if copy is None:
        yield None
        return
    try:
        is_ip = copy.family in (socket.AF_INET, socket.AF_INET6)
        yield copy if is_ip and copy.type == socket.SOCK_STREAM else None
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

    groups = all_groups()
    threading.Thread(target=keep, args=(groups,), name="paceline-left", daemon=True).start()


def _abortable() -> list[Backend]:
    return [
        backend
        for group in reversed(all_groups())
        for backend, devices in backends_of(group).items()
        if _is_accelerators(devices)
    ]


def _is_accelerators(devices: set[torch.device]) -> bool:
    """Whether what sends the tensors of these devices is an accelerator's own: gloo serves CPUs."""
    return all(map(is_accelerator, devices))


def _abort_one(backend: Backend) -> None:
    try:
        backend.abort()
    except RuntimeError as error:  # it is being left: the log has why
        print(f"a process group did not abort: {error}", file=sys.stderr, flush=True)
