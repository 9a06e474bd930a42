"""Agents of a run on the host where this runs: whether one is gone, and its end.

    python -m paceline.control.host_agents --run DIR --agent N --host H   end with 0 when it is gone

Leaves out how one gets there (`launch/ssh.py`, `launch/srun.py`), and what is to be seen there
(`topology/node`).
"""

import argparse
import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

GONE, LIVES = 0, 3
"""Exit codes about an agent."""

_END_S = 5.0
"""How long an agent may take to die of SIGKILL. A guess; then its host is in trouble."""


def agents_here(
    run: Path, *, node: int | None = None, host: str | None = None, pid: int | None = None
) -> list[int]:
    """Process ids of a run's agents. Zombies are none: they have no arguments.

    Args:
        node: Only that of this node.
        host: Only those that were started on the host of this name.
        pid: Only this process, if it is one.
    """
    folders = Path("/proc").glob("[0-9]*") if pid is None else [Path(f"/proc/{pid}")]
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
            and (host is None or pairs.get(b"--host") == host.encode())
            and (node is None or pairs.get(b"--node") == str(node).encode())
        ):
            found.append(int(folder.name))
    return found


def end_agents(
    run: Path, *, node: int | None = None, host: str | None = None, pid: int | None = None
) -> bool:
    """SIGKILL to them; the kernel ends their workers. Whether they are gone."""
    deadline = time.monotonic() + _END_S
    while (pids := agents_here(run, node=node, host=host, pid=pid)) and time.monotonic() < deadline:
        for each in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.02)
    return not pids


def main() -> int:
    parser = argparse.ArgumentParser(prog="paceline-host-agents", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument(
        "--agent", type=int, required=True, help="node whose agent is asked about; -1 for all"
    )
    parser.add_argument("--host", default="", help="what this machine is called by who asks")
    parser.add_argument("--pid", type=int, default=0, help="the agent's process, where known")
    parser.add_argument("--end", action="store_true", help="end it by force")
    options = parser.parse_args()
    node = None if options.agent < 0 else options.agent
    run, asked = options.run, {"node": node, "host": options.host, "pid": options.pid or None}
    is_gone = end_agents(run, **asked) if options.end else not agents_here(run, **asked)
    return GONE if is_gone else LIVES


if __name__ == "__main__":
    sys.exit(main())
