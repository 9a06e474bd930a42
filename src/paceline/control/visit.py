"""A short visit to one host of a run: what is to be seen there, and the end of an agent.

    python -m paceline.control.visit --run DIR --note NAME          look, and say what is there
    python -m paceline.control.visit --run DIR --agent N --host H   end with 0 when it is gone

Leaves out how one gets there (`launch/ssh.py`, `launch/srun.py`). Nothing but the standard library
is needed to say what is missing.
"""

import argparse
import contextlib
import itertools
import os
import platform
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

import paceline

ANSWER = "paceline-visit "
"""Before what is said on standard output: shells greet people there."""

GONE, LIVES = 0, 3
"""Exit codes about an agent."""

_END_S = 5.0
"""How long an agent may take to die of SIGKILL. A guess; then its host is in trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a host is like."""

    name: str
    note: str | None
    """The text of the note that was left in the run's folder; None where it is not to be seen."""

    can_write: bool
    paceline: str
    python: str
    unix_s: float
    """Its clock."""

    memory_bytes: int | None
    """Free in `/dev/shm`, where snapshots are; None where there is none."""


def look(run: Path, note: str) -> Seen:
    """What this machine is like, and what it sees of the run's folder."""
    path = run / note
    try:
        text: str | None = path.read_text()
    except OSError:
        text = None
    memory = None
    with contextlib.suppress(OSError):
        memory = shutil.disk_usage("/dev/shm").free
    return Seen(
        name=platform.node(),
        note=text,
        can_write=os.access(run, os.W_OK),
        paceline=paceline.__version__,
        python=platform.python_version(),
        unix_s=time.time(),
        memory_bytes=memory,
    )


def agents_here(run: Path, node: int | None, host: str, pid: int) -> list[int]:
    """Process ids of a run's agents that were started on the host of this name.

    Args:
        node: None for those of every node.
        pid: Only this one, if it is one; 0 for all.
    """
    folders = [Path(f"/proc/{pid}")] if pid else list(Path("/proc").glob("[0-9]*"))
    found = []
    for folder in folders:
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        pairs = dict(itertools.pairwise(words))
        if (
            b"paceline.control.agent" in words
            and pairs.get(b"--run") == str(run).encode()
            and pairs.get(b"--host") == host.encode()
            and (node is None or pairs.get(b"--node") == str(node).encode())
        ):
            found.append(int(folder.name))
    return found


def end_agents(run: Path, node: int | None, host: str, pid: int) -> bool:
    """SIGKILL to them; the kernel ends their workers. Whether they are gone."""
    deadline = time.monotonic() + _END_S
    while (pids := agents_here(run, node, host, pid)) and time.monotonic() < deadline:
        for each in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)
    return not pids


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="paceline-visit", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--note", help="file in it that was left to be found")
    parser.add_argument("--agent", type=int, help="node whose agent is asked about; -1 for all")
    parser.add_argument("--host", default="", help="what this machine is called by who asks")
    parser.add_argument("--pid", type=int, default=0, help="the agent's process, where known")
    parser.add_argument("--end", action="store_true", help="end it by force")
    options = parser.parse_args()
    if options.note is not None:
        print(ANSWER + msgspec.json.encode(look(options.run, options.note)).decode(), flush=True)
        return 0
    if options.agent is None:
        parser.error("--note or --agent")
    node = None if options.agent < 0 else options.agent
    asked = (options.run, node, options.host, options.pid)
    is_gone = end_agents(*asked) if options.end else not agents_here(*asked)
    return GONE if is_gone else LIVES


if __name__ == "__main__":
    sys.exit(main())
