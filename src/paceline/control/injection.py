"""What an agent does for a drill: signals to workers, to itself and to the controller, and damage
to checkpoints.

Leaves out: what a worker does to itself (`runtime/faults.py`).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from paceline.job.fault_grammar import Fault
from paceline.record.checkpoints import list_checkpoints

_SLICE_S = 0.01
"""Seconds for which `slow` stops a worker, and then lets it go on. A guess: much less than a step
takes, much more than a switch of processes."""

_SEEN_S = 0.05
"""How long the controller gets to put the fault on its record before it is hit itself: a hundred
times what it takes here."""

DAMAGES = ("torn", "zeroed", "flipped", "swapped", "missing")
FILLER = "filler.tmp"
"""Name of the file that fills a disk."""


def signal_group(pid: int, number: signal.Signals) -> None:
    """To all of a worker's process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


async def carry_out(
    fault: Fault,
    victim: int,
    workers: Sequence[int],
    checkpoints: Path,
    *,
    fork_server: int | None,
) -> None:
    """Do to a worker or its node what a fault asks; the fault is on the record already."""
    seconds = fault.for_s or 0.0
    match fault.kind:
        case "kill" | "store" | "spare":
            signal_group(victim, signal.SIGKILL)
        case "stop":
            signal_group(victim, signal.SIGSTOP)
        case "zombie":
            signal_group(victim, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            signal_group(victim, signal.SIGCONT)
        case "slow":
            await _slow_down(victim, seconds)
        case "agent":
            os.kill(os.getpid(), signal.SIGKILL)
        case "node":
            for pid in workers:
                signal_group(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "fork-server" if fork_server is not None:
            os.kill(fork_server, signal.SIGKILL)
        case "pause-agent":
            _wake_later(os.getpid(), seconds)
            os.kill(os.getpid(), signal.SIGSTOP)
        case "controller" | "term":
            await asyncio.sleep(_SEEN_S)
            number = signal.SIGKILL if fault.kind == "controller" else signal.SIGTERM
            os.kill(os.getppid(), number)
        case "full-disk":
            await _fill(checkpoints, seconds)
        case kind if kind in DAMAGES:
            damage_newest(checkpoints, kind)
            for pid in workers:
                signal_group(pid, signal.SIGKILL)


async def _slow_down(pid: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        signal_group(pid, signal.SIGSTOP)
        await asyncio.sleep(_SLICE_S)
        signal_group(pid, signal.SIGCONT)
        await asyncio.sleep(_SLICE_S)


def _wake_later(pid: int, seconds: float) -> None:
    subprocess.Popen(
        ["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


async def _fill(folder: Path, seconds: float) -> None:
    """Leave no byte on a disk that is the folder's alone: never on one that others use."""
    if not os.path.ismount(folder):
        return
    filler = folder / FILLER
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    await asyncio.sleep(seconds)
    filler.unlink(missing_ok=True)


def damage_newest(checkpoints: Path, kind: str) -> None:
    """Spoil the newest complete checkpoint; nothing without one."""
    newest = next((each for each in list_checkpoints(checkpoints) if each.is_complete), None)
    if newest is None:
        return
    files = sorted(
        (path for path in newest.path.iterdir() if path.name not in ("COMMIT", "manifest.json")),
        key=lambda path: (-path.stat().st_size, path.name),
    )
    target, size = files[0], files[0].stat().st_size
    if kind == "missing":
        (newest.path / ".metadata").unlink(missing_ok=True)
    elif kind == "swapped":
        spare = newest.path / "swap"
        target.rename(spare)
        files[1].rename(target)
        spare.rename(files[1])
    elif kind == "torn":
        os.truncate(target, size // 2)
    else:
        with target.open("r+b") as file:
            file.seek(size // 2)
            rest = file.read()
            file.seek(size // 2)
            file.write(bytes(len(rest)) if kind == "zeroed" else bytes([rest[0] ^ 16]))
