"""Who is in charge of a run: one controller at a time, and where its agents find it.

Two locks in the run's folder. `control.lock` is of the process that controls the run, and of nobody
else. `lock` is also held by every agent, so that a run whose controller was killed is not started a
second time while its workers live; a controller that finds it held takes those over.

Where the file system has no locks, the locks are in this machine's temporary folder, and
`control.owner` in the run's folder keeps other machines out. Agents of other machines are not seen
then: their leases end them.
"""

import errno
import fcntl
import hashlib
import os
import signal
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from paceline.errors import JobError, Problem
from paceline.record.lines import read_json, write_whole

CONTROL_FILE = "control.json"

OWNER_FILE = "control.owner"
"""Only where the file system has no locks."""

_DYING_S = 0.5
"""How long a controller that was killed may still seem to live, and hold its lock. A guess."""

_ENDING_S = 25.0
"""How long the end of a run may take, once that is recorded: its controller waits ten seconds for
agents to leave and ten for their processes. The rest is a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InCharge:
    """Contents of `control.json`."""

    pid: int
    epoch: int
    host: str
    port: int
    machine: str = ""
    """Which machine its clock and its process id are of."""

    started: int = 0
    """When its process started, in clock ticks since the machine did; 0 where that is not known. A
    process id alone is given to another process after a while."""

    @classmethod
    def here(cls, *, epoch: int, host: str, port: int) -> "InCharge":
        """This process in charge of a run."""
        pid = os.getpid()
        started = _started(pid) or 0
        return cls(pid=pid, epoch=epoch, host=host, port=port, machine=machine(), started=started)

    def interrupt(self) -> bool:
        """Send SIGINT to the process on this machine; whether it still is that process.

        Raises:
            PermissionError: It belongs to another user.
        """
        try:
            held = os.pidfd_open(self.pid)  # stays with this process when its id is given on
        except ProcessLookupError:
            return False
        try:
            if not self.started or _started(self.pid) != self.started:
                return False
            signal.pidfd_send_signal(held, signal.SIGINT)
        except ProcessLookupError:
            return False
        finally:
            os.close(held)
        return True

    @property
    def address(self) -> tuple[str, int]:
        """Where agents connect."""
        return self.host, self.port


def publish_controller(folder: Path, controller: InCharge) -> None:
    """Tell agents where to look when they have lost their controller."""
    write_whole(folder / CONTROL_FILE, msgspec.json.encode(controller))


def find_controller(folder: Path) -> InCharge | None:
    """The last that published itself, whether or not it lives; None when there is none."""
    return read_json(folder / CONTROL_FILE, InCharge)


def claim_control(folder: Path, *, patience_s: float) -> IO[bytes]:
    """The right to control the run, until every process that has the returned file open is through.

    Raises:
        JobError: Another process controls it.
    """
    return _lock(folder, "control.lock", fcntl.LOCK_EX, patience_s)


def claim_from_another(
    folder: Path,
    *,
    patience_s: float,
    is_over: Callable[[float], bool],
    is_here: bool = True,
    on_wait: Callable[[], None] = lambda: None,
) -> IO[bytes]:
    """The right to control the run, which another command may have had until now.

    Waits for what is left of a controller that died, and for the end of a run that is over.

    Args:
        patience_s: How long to wait for what is left.
        is_over: Whether the run's end was recorded after this time (unix).
        is_here: Whether the other one was on this machine, so that its process id says something.
        on_wait: Called once where another has to be waited for.

    Raises:
        JobError: A controller is at work; that is said at once, where it can be told.
    """
    began = time.monotonic()
    while True:
        try:
            return claim_control(folder, patience_s=_DYING_S)
        except JobError:
            waited_s, controller = time.monotonic() - began, find_controller(folder)
            if controller is None:
                if waited_s > patience_s:
                    raise
            elif is_over((folder / CONTROL_FILE).stat().st_mtime):
                if waited_s > _ENDING_S:
                    raise
            elif waited_s > patience_s or (is_here and _lives(controller.pid)):
                raise
            on_wait()
            on_wait = _nothing


def _nothing() -> None:
    pass


def hold_agents(folder: Path) -> IO[bytes]:
    """What agents inherit so that the run is held while they live. Several may hold it."""
    return _lock(folder, "lock", fcntl.LOCK_SH, 0.0)


def hold_alone(folder: Path, *, patience_s: float) -> IO[bytes]:
    """Hold the run's folder, when no agent of before lives.

    Raises:
        JobError: One does.
    """
    lock = _lock(folder, "lock", fcntl.LOCK_EX, patience_s)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def is_held(folder: Path) -> bool:
    """Whether the run has a controller or agents now. Nothing is written there, so the runs of
    others and those on a disk that is read-only can be asked about too."""
    return any(_is_locked(folder, name) for name in ("control.lock", "lock"))


def _is_locked(folder: Path, name: str) -> bool:
    found = _probe(folder / name)
    if found is not None:
        return found
    owner = read_json(folder / OWNER_FILE, _Owner)
    if owner is not None and owner.machine != machine():
        return True  # as far as can be seen from here
    return _probe(_own_locks_of(folder) / name) is True


def _probe(path: Path) -> bool | None:
    try:
        lock: IO[bytes] = path.open("r+b")
        kind = fcntl.LOCK_EX
    except OSError:
        try:
            lock, kind = path.open("rb"), fcntl.LOCK_SH  # does not see those who share it
        except OSError:
            return False
    try:
        with lock:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _HAS_NONE else error.errno in _IS_HELD
    return False


def _lives(pid: int) -> bool:
    """Whether there is such a process, other than one that only waits to be reaped (Linux)."""
    stat = _stat(pid)
    return bool(stat) and stat[0] not in ("Z", "X")


def _started(pid: int) -> int | None:
    stat = _stat(pid)
    return int(stat[19]) if stat else None


def _stat(pid: int) -> list[str]:
    """Fields of `/proc/PID/stat` from the third on (proc(5)): its state first, its start 20th."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _lock(folder: Path, name: str, kind: int, patience_s: float) -> IO[bytes]:
    lock: IO[bytes] = (folder / name).open("a+b")  # NFS wants to read where it is to lock for all
    try:
        return _locked(lock, folder, kind, patience_s)
    except _NoLocks as error:
        lock.close()
        reason = str(error)
    own = (_own_locks(folder) / name).open("a+b")
    lock = _locked(own, folder, kind, patience_s)
    if name == "control.lock":
        try:
            _claim_among_machines(folder, lock, reason)
        except JobError:
            lock.close()
            raise
    return lock


class _NoLocks(Exception):
    """The file system knows no locks."""


def _locked(lock: IO[bytes], folder: Path, kind: int, patience_s: float) -> IO[bytes]:
    """The file once it is locked; closed when it cannot be.

    Raises:
        JobError: Another process holds it, or the system refuses for another reason.
        _NoLocks: Its file system has none.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _IS_HELD and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            lock.close()
            if error.errno in _IS_HELD:
                raise JobError(_held(folder)) from None
            reason = error.strerror or str(error)
            if error.errno in _HAS_NONE:
                raise _NoLocks(reason.lower()) from None
            raise JobError(_cannot_lock(folder, reason.lower())) from None
        return lock


_IS_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
"""flock(2) has the first; file systems that make it a lock of fcntl(2), such as NFS, all."""

_HAS_NONE = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Lustre without `-o flock` answers ENOSYS, NFS whose server locks nothing ENOLCK."""


def _own_locks(folder: Path) -> Path:
    """Where this machine's processes lock a run whose file system has no locks. Like any lock, one
    there ends with the processes that hold it."""
    locks = _own_locks_of(folder)
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    return locks


def _own_locks_of(folder: Path) -> Path:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"paceline-locks-{os.getuid()}" / digest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owner:
    """Contents of `control.owner`: who claimed a run whose file system has no locks."""

    host: str
    pid: int
    machine: str


def _claim_among_machines(folder: Path, lock: IO[bytes], reason: str) -> None:
    """Leave word, for other machines, of who controls the run; taken away when the lock is let go.

    Processes of this machine are told apart by a lock of its own.

    Raises:
        JobError: A process of another machine has left its word there.
    """
    path = folder / OWNER_FILE
    mine = _Owner(host=socket.gethostname(), pid=os.getpid(), machine=machine())
    try:
        with path.open("xb") as file:  # O_EXCL: one of several wins
            file.write(msgspec.json.encode(mine))
        print(
            f"paceline: {folder} is on a file system without locks ({reason}); the run is held by "
            f"{OWNER_FILE} there and by a lock of this machine",
            file=sys.stderr,
        )
    except FileExistsError:
        owner = read_json(path, _Owner)
        if owner is None or owner.machine != mine.machine:
            raise JobError(_owned(folder, owner, reason)) from None
        write_whole(path, msgspec.json.encode(mine))
    weakref.finalize(lock, _give_up, path, mine)


def _give_up(path: Path, mine: _Owner) -> None:
    # A process that was forked has this, too.
    if os.getpid() == mine.pid and read_json(path, _Owner) == mine:
        path.unlink(missing_ok=True)


def machine() -> str:
    """What tells this machine, since its last start, from every other: their monotonic clocks and
    process ids have nothing to do with each other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _cannot_lock(folder: Path, reason: str) -> Problem:
    return Problem(
        code="R004",
        what=f"{folder} cannot be locked: {reason}",
        where=str(folder),
        fix="look at the file system, or put the run in another folder with --out",
    )


def _owned(folder: Path, owner: _Owner | None, reason: str) -> Problem:
    by = "somebody" if owner is None else f"process {owner.pid} on {owner.host}"
    return Problem(
        code="R004",
        what=f"{by} claimed {folder}, on a file system without locks ({reason}): whether that "
        "process lives cannot be seen from here",
        where=str(folder / OWNER_FILE),
        fix="if it has ended, wait for recovery.lease and recovery.grace, so that its workers have "
        f"stopped, and remove {OWNER_FILE}. With locks this does not happen: mount Lustre with "
        "-o flock, NFS with locks, or choose another folder with --out",
    )


def _held(folder: Path) -> Problem:
    return Problem(
        code="R004",
        what=f"another process is running {folder}",
        where=str(folder),
        fix="wait for it, or stop it with Ctrl-C where it runs; after a kill, its workers "
        "take up to recovery.lease and recovery.grace to stop",
    )
