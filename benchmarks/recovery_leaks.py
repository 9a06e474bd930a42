"""Whether survivors of many recoveries keep what they should have let go of.

    .venv/bin/python benchmarks/recovery_leaks.py [num_recoveries]

One run of four ranks, in which rank 3 is killed every 10 steps. After each recovery descriptors,
threads, sockets and resident memory of rank 0, which survives them all, are read from /proc, and so
are the agent's, the fork server's and what lies in /dev/shm. Flat means: the median of the last
quarter is no more than that of the second (the first is warm-up).
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from figures import machine
from recovery import JOB

from paceline.record import events as log

EVERY = 10
_TOLERANCE = {"descriptors": 0, "threads": 0, "sockets": 0, "RSS MiB": 16, "/dev/shm files": 0}
"""By how much the last quarter may lie above the second. Memory: the allocator's own slack."""


def main() -> None:
    """Print what each process held at the start, in the middle and at the end."""
    num = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"measured; {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        faults = [f"kill rank=3 step={EVERY * (n + 1)} when=spare" for n in range(num)]
        job: dict[str, Any] = JOB | {
            "cluster": {"accelerator": "cpu", "per_node": 4},
            "layout": {"sharding": "none", "data": 4},
            "train": JOB["train"] | {"steps": EVERY * (num + 2)},
            "drill": {"faults": faults},
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--out", "run"]
        with (folder / "output").open("w") as output:
            run = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
        seen = watch(run, folder / "run" / "events.jsonl")
        if run.wait():
            raise SystemExit((folder / "output").read_text()[-3000:])
        num_back = sum(isinstance(e, log.Recovered) for e in _events(folder))
    print(f"{num_back} recoveries in one run")
    flat = [report(name, values) for name, values in seen.items()]
    sys.exit(0 if all(flat) else 1)


def _events(folder: Path) -> list[log.AnyEvent]:
    return log.read_events(folder / "run" / "events.jsonl")


def watch(run: "subprocess.Popen[bytes]", file: Path) -> dict[str, list[int]]:
    """Name -> what was seen after each recovery."""
    seen: dict[str, list[int]] = {}
    known, began = 0, time.monotonic()
    while run.poll() is None:
        events = log.read_events(file)
        num = sum(isinstance(event, log.Recovered) for event in events)
        if num > known:
            known = num
            time.sleep(0.1)  # the next generation is at work, and the last one's sockets are gone
            first = next(e for e in events if isinstance(e, log.WorkerStarted) and e.rank == 0)
            agent = _parent(_parent(first.pid) or 0)
            for name, pid in (("rank 0", first.pid), ("agent", agent), ("controller", run.pid)):
                for what, value in held(pid or 0).items():
                    seen.setdefault(f"{name} {what}", []).append(value)
            seen.setdefault("/dev/shm files", []).append(len(os.listdir("/dev/shm")))
            now = {name: values[-1] for name, values in seen.items() if name.startswith("rank 0")}
            print(f"{time.monotonic() - began:.0f} s, recovery {num}: {now}", flush=True)
        time.sleep(0.02)
    return seen


def held(pid: int) -> dict[str, int]:
    """Of one process, now; empty when it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        names = [os.readlink(path) for path in (folder / "fd").iterdir()]
        status = (folder / "status").read_text()
    except OSError:
        return {}
    words = {key: rest.split()[0] for key, _, rest in _pairs(status) if rest.split()}
    return {
        "descriptors": len(names),
        "sockets": sum(name.startswith("socket:") for name in names),
        "threads": int(words["Threads"]),
        "RSS MiB": int(words["VmRSS"]) // 1024,
    }


def _pairs(status: str) -> list[tuple[str, str, str]]:
    return [line.partition(":") for line in status.splitlines()]


def _parent(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(status.split("PPid:")[1].split()[0])


def report(name: str, values: Sequence[int]) -> bool:
    """One line; whether it is flat."""
    if len(values) < 8:
        print(f"  {name}: {list(values)} (too few to judge)")
        return True
    quarter = len(values) // 4
    second = statistics.median(values[quarter : 2 * quarter])
    last = statistics.median(values[-quarter:])
    allowed = next((room for what, room in _TOLERANCE.items() if name.endswith(what)), 0)
    is_flat = last <= second + allowed
    print(
        f"  {name}: first {values[0]}, second quarter {second:g}, last quarter {last:g}, "
        f"max {max(values)}, n = {len(values)}: {'flat' if is_flat else 'GROWS'}"
    )
    return is_flat


if __name__ == "__main__":
    main()
