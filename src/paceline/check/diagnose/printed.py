"""Failures that print a message of their own, and what readers of dumps and reports conclude.

A line that healthy runs print too needs a second fact.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from paceline.catalog.failure import Effect, load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.candidate import Candidate, Level, level_of, ranks_of
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.hang import around
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.matcher import benign
from paceline.check.diagnose.messages import OutOfMemory, say, who
from paceline.check.diagnose.ranks import with_rank_of_gpu
from paceline.check.diagnose.seen import Seen, Sighting


def printed(seen: Seen) -> Iterator[Candidate]:
    """Failures that print their own message."""
    for sighting in seen.sightings.values():
        if sighting.weak:
            continue
        name, lines, (line, said) = sighting.name, sighting.lines, sighting.fullest
        if name.startswith("xid-"):
            lines = [with_rank_of_gpu(line, seen.rank_of_gpu) for line in lines]
        yield Candidate(
            id=name,
            level=level_of(load_failures()[name]),
            confidence=_surely(name, lines),
            lines=lines,
            what=say(name, line, said, ranks_of(lines)),
            count=sighting.count,
        )


_SAYS_WHY = {
    "host-oom-sigkill": re.compile(r"(?i)out of memory|\boom|killed as a result of limit"),
    "sigterm-preempted": re.compile(r"(?i)due to|preempt|reclaim|interruption|limit|walltime"),
}
"""Failures that most of their lines fit and do not prove: a signal has many senders."""


def _surely(name: str, lines: Iterable[Line]) -> Confidence:
    proof = _SAYS_WHY.get(name)
    if proof is None or any(proof.search(line.raw) for line in lines):
        return Confidence.CERTAIN
    return Confidence.LIKELY


def weakly_printed(seen: Seen) -> Iterator[Candidate]:
    """Failures whose lines need a second fact: those that have it, and the rest as possible."""
    run = around(seen)
    for sighting in seen.sightings.values():
        if not sighting.weak:
            continue
        name, lines, (_, said) = sighting.name, sighting.lines, sighting.fullest
        failure = load_failures()[name]
        level = level_of(failure)
        if fact := _SECOND.get(name, _of_table)(seen, sighting, run):
            yield Candidate(
                id=name,
                level=level,
                confidence=Confidence.LIKELY,
                lines=lines,
                what=f"{say(name, lines[0], said, ranks_of(lines))}: {fact}",
                count=sighting.count,
            )
            continue
        lines = [line for line in lines if not benign().search(line.raw)]
        if level >= Level.FOLLOWS:
            level = Level.MAY_FOLLOW
        elif failure.category == "hang" or failure.effect is Effect.HANG:
            continue
        else:
            level = Level.POSSIBLE if level < Level.QUIET else Level.FITS
        if lines:
            yield Candidate(
                id=name,
                level=level,
                confidence=Confidence.POSSIBLE,
                lines=lines,
                what=say(name, lines[0], {}, ranks_of(lines)),
            )


def concluded(seen: Seen) -> Iterator[Candidate]:
    """What dumps and NCCL's report say."""
    for each in seen.found:
        level = level_of(load_failures()[each.id])
        if each.check is not None:
            yield Candidate(
                id=each.id,
                level=Level.POSSIBLE,
                confidence=Confidence.CERTAIN if each.is_certain else Confidence.POSSIBLE,
                lines=[each.line],
                what=each.what,
                order=-1,  # before its own lines alone, which say no check
                check=each.check,
                title=each.title,
            )
            continue
        yield Candidate(
            id=each.id,
            level=level if each.is_certain or level is Level.QUIET else Level.READ,
            confidence=Confidence.CERTAIN if each.is_certain else Confidence.LIKELY,
            lines=[each.line],
            what=f"{who(each.ranks)}{each.what}" if each.ranks else each.what,
            place=each.place,
            rank=each.ranks[0] if each.ranks else None,
            title=each.title,
        )


_FSDP = re.compile(r"(?i)fsdp|fully_?shard")
_OFFLOADS = re.compile(
    r"(?i)cpu_?offload(?!\w*\W{1,4}(false|none|no\b|0))|offload_params\W{1,4}true"
)
"""A run of FSDP that says it offloads to the CPU."""


def specialise(candidates: list[Candidate], seen: Seen) -> None:
    """Choose between failures that share their message, by its numbers."""
    by_id = {each.id: each for each in candidates if each.confidence is not Confidence.POSSIBLE}
    if (full := by_id.get("cuda-oom")) is not None:
        if OutOfMemory(full.lines[0].raw).is_fragmented:
            candidates.append(_as(full, "cuda-oom-fragmentation"))
        if _FSDP.search(around(seen)) and _OFFLOADS.search(around(seen)):
            candidates.append(replace(_as(full, "fsdp-cpu-offload-oom"), order=-1))


def _as(of: Candidate, name: str) -> Candidate:
    """The candidate's lines read as another failure, which is likely."""
    return replace(of, id=name, confidence=Confidence.LIKELY, notes=[])


def _of_table(seen: Seen, sighting: Sighting, run: str) -> str | None:
    row = read_shipped("second_facts.toml").get(sighting.name, {"facts": []})
    rows = row.get("facts", [row])
    return next(filter(None, (_fact(row, seen, sighting, run) for row in rows)), None)


def _fact(row: Mapping[str, Any], seen: Seen, sighting: Sighting, run: str) -> str | None:
    named: dict[str, str] = {}
    for name, text in (("run", run), ("line", _text(sighting))):
        if form := row.get(f"in_{name}"):
            if (found := re.search(form, text)) is None:
                return None
            named |= found.groupdict()
        if f"not_in_{name}" in row and re.search(row[f"not_in_{name}"], text):
            return None
    if sighting.count < row.get("often", 0) or ("last_line" in row and not _ends(seen, sighting)):
        return None
    fact: str = row["fact"]
    return fact.format_map(named)


def _text(sighting: Sighting) -> str:
    return "\n".join(line.raw for line, _ in sighting.first)


def _all_on_gpu_0(seen: Seen, sighting: Sighting, run: str) -> str | None:
    lines = [line for line in sighting.lines if "out of memory" in line.raw]
    ranks = {line.rank for line in lines if line.rank is not None}
    others = max((OutOfMemory(line.raw).others for line in lines), default=0)
    if lines and (len(ranks) > 1 or others > 1):
        return "several processes hold memory on GPU 0"
    return None


def _ends(seen: Seen, sighting: Sighting) -> bool:
    """Whether a log's last line is one of them."""
    last = {source.name: source.num_lines for source in seen.sources}
    return any(line.number == last.get(line.source) for line in sighting.lines)


def _cancelled(seen: Seen, sighting: Sighting, run: str) -> str | None:
    """Slurm also cancels a step of which one task has failed."""
    if "CANCELLED" not in _text(sighting):
        return None
    own = any(each.code not in (0, -15) for each in seen.exits) or seen.raised
    return None if own else "cancelled by hand or by the scheduler; sacct -j says which"


def _members(seen: Seen, sighting: Sighting, run: str) -> str | None:
    """More processes than the group was told to have (fewer are late and no more), or one place in
    it taken twice and others not at all."""
    told = [groups for _, groups in sighting.first]
    for said in told:
        if int(said.get("have", 0)) > int(said.get("want", 0)):
            return f"{said['have']} processes came to a group of {said['want']}"
    places = [said["at"] for said in told if "at" in said]
    of = max((int(said["of"]) for said in told if "at" in said), default=0)
    if len(set(places)) < min(len(places), of):
        return f"places {', '.join(sorted(set(places)))} of {of} are taken more than once"
    if "handled by Slurm" in run and len(set(places)) < of and _ends(seen, sighting):
        return f"{len(set(places))} of {of} places are taken, and nothing came after it"
    return None


def _same_task_waits(seen: Seen, sighting: Sighting, run: str) -> str | None:
    """One task that is waited for three times, half a minute, and no session after it."""
    tasks = Counter(said["task"] for _, said in sighting.first if "task" in said)
    if not tasks or "Start master session" in run:
        return None
    task, times = tasks.most_common(1)[0]
    return f"{task} did not answer {times} times" if times >= _PATIENCE else None


_PATIENCE = 3
"""Times that a start may wait for one task: TensorFlow says so each ten seconds."""


_SECOND: Mapping[str, Callable[[Seen, Sighting, str], str | None]] = {
    "missing-set-device": _all_on_gpu_0,
    "slurm-ntasks-mismatch": _members,
    "sigterm-preempted": _cancelled,
    "tf-config-mismatch": _same_task_waits,
}
"""Weak failures whose second fact is read by more than a pattern. The hangs' are in `hang`."""
