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
    row = read_shipped("second_facts.toml").get(sightings[0].name, {"facts": []})
    rows = row.get("facts", [row])
    return next(filter(None, (_fact(row, seen, sightings, run) for row in rows)), None)


def _fact(row: Mapping[str, Any], seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    named: dict[str, str] = {}
    for name, text in (("run", run), ("line", _text(sightings))):
        if form := row.get(f"in_{name}"):
            if (found := re.search(form, text)) is None:
                return None
            named |= found.groupdict()
        if f"not_in_{name}" in row and re.search(row[f"not_in_{name}"], text):
            return None
    if _count(sightings) < row.get("often", 0) or (
        "last_line" in row and not _ends(seen, sightings)
    ):
        return None
    fact: str = row["fact"]
    return fact.format_map(named)


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


def _mtu(seen: Seen, sightings: list[Sighting], run: str) -> str | None:
    sizes = set(re.findall(r"\bmtu (\d+)", run))
    return f"interfaces with MTU {' and '.join(sorted(sizes))}" if len(sizes) > 1 else None


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
    "mtu-mismatch": _mtu,
    "sigterm-preempted": _cancelled,
    "tf-config-mismatch": _same_task_waits,
}
"""Weak failures whose second fact is read by more than a pattern. The hangs' are in `hang`."""
