"""Who is in charge of a run: one controller at a time, and where its agents find it.

Two locks in the run's folder. `control.lock` is of the process that controls the run, and of nobody
else. `lock` is also held by every agent, so that a run whose controller was killed is not started a
second time while its workers live; a controller that finds it held takes those over.
"""

import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from paceline.errors import JobError, Problem
from paceline.record.lines import write_whole

CONTROL_FILE = "control.json"

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

    @property
    def address(self) -> tuple[str, int]:
        """Where agents connect."""
        return self.host, self.port


def publish_controller(folder: Path, controller: InCharge) -> None:
    """Tell agents where to look when they have lost their controller."""
    write_whole(folder / CONTROL_FILE, msgspec.json.encode(controller))


def find_controller(folder: Path) -> InCharge | None:
    """The last that published itself, whether or not it lives; None when there is none."""
    try:
        return msgspec.json.decode((folder / CONTROL_FILE).read_bytes(), type=InCharge)
    except (OSError, msgspec.DecodeError):
        return None


def claim_control(folder: Path, *, patience_s: float) -> IO[bytes]:
    """The right to control the run, until every process that has the returned file open is through.

    Raises:
        JobError: Another process controls it.
    """
    return _lock(folder, "control.lock", fcntl.LOCK_EX, patience_s)


def claim_from_another(
    folder: Path, *, patience_s: float, is_over: Callable[[float], bool], is_here: bool = True
) -> IO[bytes]:
    """The right to control the run, which another command may have had until now.

    Waits for what is left of a controller that died, and for the end of a run that is over.

    Args:
        patience_s: How long to wait for what is left.
        is_over: Whether the run's end was recorded after this time (unix).
        is_here: Whether the other one was on this machine, so that its process id says something.

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


def hold_agents(folder: Path) -> IO[bytes]:
    """What agents inherit so that the run is held while they live. Several may hold it."""
    return _lock(folder, "lock", fcntl.LOCK_SH, 0.0)


def hold_alone(folder: Path, *, patience_s: float) -> IO[bytes]:
    """The same, when no agent of before lives.

    Raises:
        JobError: One does.
    """
    lock = _lock(folder, "lock", fcntl.LOCK_EX, patience_s)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def is_held(folder: Path) -> bool:
    """Whether the run has a controller or agents now."""
    try:
        claim_control(folder, patience_s=0.0).close()
        hold_alone(folder, patience_s=0.0).close()
    except JobError:
        return True
    return False


def _lives(pid: int) -> bool:
    """Whether there is such a process, other than one that only waits to be reaped (Linux)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _lock(folder: Path, name: str, kind: int, patience_s: float) -> IO[bytes]:
    lock = (folder / name).open("a+b")  # NFS wants to read where it is to lock for all
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            lock.close()
            raise JobError(_held(folder)) from None
        return lock


def _held(folder: Path) -> Problem:
    return Problem(
        code="R004",
        what=f"another process is running {folder}",
        where=str(folder),
        fix="wait for it, or stop it with Ctrl-C where it runs; after a kill, its workers "
        "take up to recovery.lease and recovery.grace to stop",
    )
