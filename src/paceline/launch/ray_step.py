"""Run a command on a node of a Ray cluster, as ssh would: its output here, its exit code ours.

    python -m paceline.launch.ray_step --list                 the nodes that are alive, as JSON
    python -m paceline.launch.ray_step --node NAME -- WORDS   a command there

`launch/ray.py` starts agents with it. An actor on that node starts the command and reads it; the
first line of standard input, where there is one, goes to the command's, and so does the end of the
input. When this process ends, Ray ends the actor, and the kernel the command. 255 says that nobody
got there.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from paceline.control.parent import die_with_parent

UNREACHED = 255
_READ_S = 0.5
"""How long a question for more output waits. A guess: it costs one message."""

_MOST_BYTES = 1 << 20
"""Bytes of output in one message."""


class Step:
    """One command on the node that this actor is on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: list[bytes] = []
        self._ready = threading.Condition()
        self._is_over = False

    def start(self, words: list[str], first_line: bytes, environment: dict[str, str]) -> None:
        """Start it. Raises OSError where it cannot be."""
        mine = os.getpid()
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            preexec_fn=lambda: die_with_parent(mine),
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(first_line)
            self._process.stdin.flush()
        threading.Thread(target=self._read, daemon=True).start()

    def end_input(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def more(self) -> tuple[bytes, int | None]:
        """What it has said since the last question, and its exit code once it has ended."""
        with self._ready:
            self._ready.wait_for(lambda: self._said or self._is_over, _READ_S)
            said, self._said = b"".join(self._said), []
            over = self._is_over
        assert self._process is not None
        if not over:
            return said, None
        self.end_input()
        return said, self._process.wait()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while part := os.read(output.fileno(), _MOST_BYTES):
                with self._ready:
                    self._said.append(part)
                    self._ready.notify()
        with self._ready:
            self._is_over = True
            self._ready.notify()


def name_of(node: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    """A node's address; where several have the same one, the beginning of its id."""
    same = [each for each in nodes if each["NodeManagerAddress"] == node["NodeManagerAddress"]]
    return str(node["NodeManagerAddress"] if len(same) == 1 else node["NodeID"][:12])


def _alive() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _list() -> Iterator[dict[str, Any]]:
    """The driver's own node last: it may hold nothing but the head."""
    nodes = _alive()
    for node in sorted(nodes, key=lambda each: str(each["NodeManagerAddress"])):
        resources = node["Resources"]
        yield {
            "name": name_of(node, nodes),
            "address": node["NodeManagerAddress"],
            "cpus": resources.get("CPU", 0.0),
            "gpus": resources.get("GPU", 0.0),
        }


def _run(node_name: str, words: list[str], cpus: float, gpus: float) -> int:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = _alive()
    found = [node for node in nodes if node_name in (name_of(node, nodes), node["NodeID"][:12])]
    if not found:
        print(f"Ray has no node {node_name} that is alive", file=sys.stderr)
        return UNREACHED
    there = NodeAffinitySchedulingStrategy(node_id=found[0]["NodeID"], soft=False)
    remote = ray.remote(Step).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=there)
    carried = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    first_line = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.readline()
    step = remote.remote()
    try:
        ray.get(step.start.remote(words, first_line, carried))
        threading.Thread(target=_pass_end, args=(step,), daemon=True).start()
        while True:
            more: tuple[bytes, int | None] = ray.get(step.more.remote())
            said, code = more
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
            if code is not None:
                return code if code >= 0 else 128 - code
    except ray.exceptions.RayActorError as error:
        print(f"node {node_name} is lost: {str(error).splitlines()[0]}", file=sys.stderr)
        return UNREACHED
    except (ray.exceptions.RayTaskError, ray.exceptions.RayError) as error:
        print(str(error).strip().splitlines()[-1], file=sys.stderr)
        return UNREACHED


def _pass_end(step: Any) -> None:
    """Wait for the end of standard input, and pass it on."""
    while sys.stdin is not None and os.read(sys.stdin.fileno(), 1 << 16):
        pass  # not by sys.stdin, whose lock must be free when Python ends
    step.end_input.remote()


def main() -> None:
    """One command, or the list of nodes."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.ray_step")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--address")
    parser.add_argument("--node")
    parser.add_argument("--cpus", type=float, default=0.0)
    parser.add_argument("--gpus", type=float, default=0.0)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Which GPUs a command sees is the command's own business where it reserves none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    try:
        address = options.address or os.environ.get("RAY_ADDRESS", "auto")
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        print(f"no Ray cluster: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        sys.exit(UNREACHED)
    if options.list:
        print(json.dumps(list(_list())), flush=True)
        return
    code = _run(options.node, options.words, options.cpus, options.gpus)
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
