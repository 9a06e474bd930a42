"""Second facts: when a line that healthy runs print too is a failure after all."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from paceline.catalog.load import read_shipped
from paceline.check.diagnose.hang import around
from paceline.check.diagnose.messages import OutOfMemory
from paceline.check.diagnose.seen import Seen, Sighting


def second_facts(seen: Seen) -> Iterator[tuple[str, str]]:
    """(failure, the second fact) of the weak sightings that have one."""
    weak: dict[str, list[Sighting]] = {}
    for sighting in seen.sightings.values():
        if sighting.weak:
            weak.setdefault(sighting.name, []).append(sighting)
    run = around(seen)
    for name, sightings in weak.items():
        reader = _READERS.get(name, _of_table)
        if fact := reader(seen, sightings, run):
            yield name, fact


def _of_table(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    row: Mapping[str, Any] = read_shipped("second_facts.toml").get(sightings[0].name, {})
    holds = (
        ("when" in row and re.search(row["when"], run))
        or ("in_line" in row and re.search(row["in_line"], _text(sightings)))
        or ("often" in row and _count(sightings) >= row["often"])
        or ("last_line" in row and _ends(seen, sightings))
    )
    return row["fact"] if holds else None


def _text(sightings: list[Sighting]) -> str:
    return "\n".join(line.raw for each in sightings for line, _ in each.first)


def _count(sightings: list[Sighting]) -> int:
    return sum(each.count for each in sightings)


def _fragmented(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    for sighting in sightings:
        for line, _ in sighting.first:
            memory = OutOfMemory(line.message)
            if memory.is_fragmented:
                return "more than was asked for"
    return None


def _all_on_gpu_0(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    lines = [line for each in sightings for line, _ in each.lines() if "out of memory" in line.raw]
    ranks = {line.rank for line in lines if line.rank is not None}
    others = max((OutOfMemory(line.raw).others for line in lines), default=0)
    if lines and (len(ranks) > 1 or others > 1):
        return "several processes hold memory on GPU 0"
    return None


def _ends(seen: Seen, sightings: list[Sighting]) -> bool:
    """Whether a log's last line is one of them."""
    last = {source.name: source.num_lines for source in seen.sources}
    lines = [line for each in sightings for line, _ in each.lines()]
    return any(line.number == last.get(line.source) for line in lines)


def _sockets(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if "Using network Socket" not in _text(sightings) and "NET/Socket" not in run:
        return None
    named = re.search(r"mlx[45]_\d|bnxt_re|\bEFA\b|efa_|InfiniBand|/dev/infiniband", run)
    if named:
        return f"the log speaks of {named[0]}"
    return None  # a cluster with Ethernet alone is as it should be


def _disk(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if re.search(
        r"SemLock|/dev/shm|shared memory|shm_open|multiprocessing/(synchronize|heap)", run
    ):
        return None
    return "a file could not be written"


def _interface(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if not re.search(
        r"ncclSystemError|unhandled system error|Connect to \S+ failed|timed out", run
    ):
        return None
    if "No route to host" in _text(sightings):
        return "no route to the address that a rank offers"
    return "ranks offer addresses of a bridge or of loopback"


def _mtu(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    sizes = set(re.findall(r"\bmtu (\d+)", run))
    return f"interfaces with MTU {' and '.join(sorted(sizes))}" if len(sizes) > 1 else None


def _shared_memory(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    if re.search(r"Cuda failure|Too many open files|Permission denied|No such file", run):
        return None
    if re.search(r"No space left|posix_fallocate|ftruncate|Bus error|/dev/shm", run):
        return "/dev/shm was full"
    return None


def _name(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """A name of a rank's host, not of a web site from which something is downloaded."""
    lines = [line.raw for each in sightings for line, _ in each.first]
    web = r"https?|urllib3|wandb|huggingface|NewConnectionError|MaxRetryError|pip\b"
    if any(re.search(web, line, re.IGNORECASE) for line in lines):
        return None
    mine = r"(?i)MASTER_ADDR|TCPStore|rdzv|rendezvous|c10d|init_process_group|gloo|NCCL|socket\.cpp"
    return "while ranks looked for each other" if re.search(mine, run) else None


def _cancelled(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """Slurm also cancels a step of which one task has failed."""
    if "CANCELLED" not in _text(sightings):
        return None
    own = any(each.code not in (0, -15) for each in seen.exits) or seen.raised
    return None if own else "cancelled by hand or by the scheduler; sacct -j says which"


def _more_came(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """More processes than the group was told to have; fewer are late and no more."""
    for sighting in sightings:
        for _, said in sighting.first:
            if int(said.get("have", 0)) > int(said.get("want", 0)):
                return f"{said['have']} processes came to a group of {said['want']}"
    return None


def _members(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """More processes than the group has, or one place in it taken twice and others not at all."""
    if (more := _more_came(seen, sightings, run)) is not None:
        return more
    said = [groups for each in sightings for _, groups in each.first if "at" in groups]
    places = [groups["at"] for groups in said]
    of = max((int(groups["of"]) for groups in said), default=0)
    if len(set(places)) < min(len(places), of):
        return f"places {', '.join(sorted(set(places)))} of {of} are taken more than once"
    if "handled by Slurm" in run and len(set(places)) < of and _ends(seen, sightings):
        return f"{len(set(places))} of {of} places are taken, and nothing came after it"
    return None


def _same_task_waits(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    """One task that is waited for three times, half a minute, and no session after it."""
    tasks = Counter(said["task"] for each in sightings for _, said in each.first if "task" in said)
    if not tasks or "Start master session" in run:
        return None
    task, times = tasks.most_common(1)[0]
    return f"{task} did not answer {times} times" if times >= _PATIENCE else None


_PATIENCE = 3
"""Times that a start may wait for one task: TensorFlow says so each ten seconds."""


_READERS: Mapping[str, Callable[[Seen, list[Sighting], str], str | None]] = {
    "cuda-oom-fragmentation": _fragmented,
    "missing-set-device": _all_on_gpu_0,
    "slurm-ntasks-mismatch": _members,
    "disk-full-checkpoint": _disk,
    "mtu-mismatch": _mtu,
    "shm-too-small": _shared_memory,
    "dns-unresolvable-master": _name,
    "sigterm-preempted": _cancelled,
    "tf-config-mismatch": _same_task_waits,
    "ethernet-fallback": _sockets,
    "nccl-wrong-interface": _interface,
}
"""Weak failures whose second fact is read by more than a pattern. The hangs' are in `hang`."""
