"""Start a launcher on the node that this runs on, and end all of it with its own input.

    python -m paceline.launch.on_node --run RUN --node 1 --nodes 8 ... -- bash launch.sh

The controller starts it on every node (`launch/program_nodes.py`) and keeps its standard input
open. When the input ends (also by a lost connection or a killed controller), the launcher gets
SIGTERM, and after `--grace` seconds everything that it started gets SIGKILL. Processes that an
earlier attempt left on this node are ended first: torchrun starts its ranks in sessions of their
own, and a launcher that was killed leaves them behind.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from paceline.control.network import address_toward, interface_of
from paceline.control.parent import die_with_parent

MARK = "PACELINE_NODE"
"""Variable of everything that is started here; its value is the run's folder and the node."""


def variables(
    *, node: int, num_nodes: int, head: str, port: int, attempt: int, run: str
) -> dict[str, str]:
    """What a launcher reads, and torchrun, to meet the other nodes; on one node, its number alone.

    torchrun takes PET_ variables for options: without PET_LOCAL_ADDR it tells the ranks the host's
    own name (torch 2.13, distributed/elastic/rendezvous/api.py, RendezvousStoreInfo), which may
    mean every machine itself.
    """
    # ssh gives a short PATH, without the environment of the Python that it starts.
    path = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    found = {"NODE_RANK": str(node), MARK: f"{run}:{node}", "PYTHONUNBUFFERED": "1"}
    found["PATH"] = os.pathsep.join(path)
    if num_nodes == 1:
        return found
    own = head if node == 0 else address_toward(head)
    interface = interface_of(own)
    return found | {
        "HEAD_ADDRESS": head,
        "HEAD_PORT": str(port),
        "RUN_ID": f"{Path(run).name}-{attempt}",
        "PET_LOCAL_ADDR": own,
        "PET_RDZV_CONF": f"is_host={'true' if node == 0 else 'false'}",
        **({"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}),
    }


def marked(mark: str, processes: Path = Path("/proc"), *, name: str = MARK) -> list[int]:
    """Processes of this machine with the mark in their environment, where it can be read. Those
    that only wait to be reaped are none."""
    wanted = f"{name}={mark}".encode()
    found = []
    for folder in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return sorted(found)


def end_marked(mark: str) -> None:
    """SIGKILL to all of them, and to those that they start meanwhile."""
    for _ in range(10):
        pids = [pid for pid in marked(mark) if pid != os.getpid()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


class Launcher:
    """A launcher of this node and what it started."""

    def __init__(self, words: list[str], folder: str, given: Mapping[str, str], grace_s: float):
        self._mark, self._grace_s = given[MARK], grace_s
        end_marked(self._mark)
        mine = os.getpid()
        self._process = subprocess.Popen(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            env=os.environ | given,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(mine),
        )

    def end(self) -> None:
        """SIGTERM to the launcher; when that takes longer than its grace, SIGKILL to everything."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._grace_s)
            return
        end_marked(self._mark)

    def wait(self) -> int:
        """Its exit code as a shell has it; nothing that it started is left then."""
        code = self._process.wait()
        end_marked(self._mark)
        return code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.on_node")
    parser.add_argument("--run", required=True)
    parser.add_argument("--folder", required=True, help="where the launcher runs")
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--head", default="127.0.0.1", help="the first node's address")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--grace", type=float, default=60.0)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("words", nargs="+")
    asked = parser.parse_args()
    given = variables(
        node=asked.node,
        num_nodes=asked.nodes,
        head=asked.head,
        port=asked.port,
        attempt=asked.attempt,
        run=asked.run,
    )
    given |= dict(each.split("=", 1) for each in asked.env)
    launcher = Launcher(asked.words, asked.folder, given, asked.grace)

    def follow_input() -> None:
        while os.read(0, 1 << 16):  # not sys.stdin, whose lock must be free when Python ends
            pass
        launcher.end()

    threading.Thread(target=follow_input, name="paceline-input", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=launcher.end).start())
    return launcher.wait()


if __name__ == "__main__":
    sys.exit(main())
