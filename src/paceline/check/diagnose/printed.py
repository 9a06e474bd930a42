"""Failures that print a message of their own, and what readers of dumps and reports conclude."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from paceline.catalog.failure import Effect, load_failures
from paceline.check.diagnose.candidate import Candidate, ranks_of
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.corroborate import second_facts
from paceline.check.diagnose.gpus import with_rank_of_gpu
from paceline.check.diagnose.hang import around
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.messages import OutOfMemory, say, who
from paceline.check.diagnose.patterns import benign
from paceline.check.diagnose.precedence import Level, level_of
from paceline.check.diagnose.seen import Seen


def printed(seen: Seen) -> Iterator[Candidate]:
    """Failures that print their own message."""
    failures = load_failures()
    by_name: dict[str, list[Line]] = {}
    groups: dict[str, tuple[Line, dict[str, str]]] = {}
    counts: dict[str, int] = {}
    for sighting in seen.sightings.values():
        if sighting.weak:
            continue
        by_name.setdefault(sighting.name, []).extend(line for line, _ in sighting.lines())
        counts[sighting.name] = counts.get(sighting.name, 0) + sighting.count
        fullest = max(sighting.first, key=lambda pair: len(pair[1]))
        if sighting.name not in groups or len(fullest[1]) > len(groups[sighting.name][1]):
            groups[sighting.name] = fullest
    for name, lines in by_name.items():
        if name.startswith("xid-"):
            lines = [with_rank_of_gpu(line, seen.rank_of_gpu) for line in lines]
        line, said = groups[name]
        yield Candidate(
            id=name,
            level=level_of(failures[name]),
            confidence=_surely(name, lines),
            lines=lines,
            what=say(name, line, said, ranks_of(lines)),
            count=counts[name],
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
    failures = load_failures()
    facts = dict(second_facts(seen))
    for name in sorted({each.name for each in seen.sightings.values() if each.weak} - facts.keys()):
        lines = [line for each in seen.sightings_of(name, weak=True) for line, _ in each.lines()]
        lines = [line for line in lines if not benign().search(line.raw)]
        hangs = failures[name].category == "hang" or failures[name].effect is Effect.HANG
        level = level_of(failures[name])
        if level >= Level.FOLLOWS:
            level = Level.MAY_FOLLOW
        elif hangs:
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
    for name, fact in facts.items():
        lines = [line for each in seen.sightings_of(name, weak=True) for line, _ in each.lines()]
        said = {
            k: v for each in seen.sightings_of(name, weak=True) for k, v in each.first[0][1].items()
        }
        yield Candidate(
            id=name,
            level=level_of(failures[name]),
            confidence=Confidence.LIKELY,
            lines=lines,
            what=f"{say(name, lines[0], said, ranks_of(lines))}: {fact}",
            count=sum(each.count for each in seen.sightings_of(name, weak=True)),
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
    fragmented = by_id.get("cuda-oom-fragmentation")
    if fragmented and "cuda-oom" in by_id:
        fragmented.lines = by_id["cuda-oom"].lines
        fragmented.level = Level.CAUSE
    if "missing-set-device" in by_id and "cuda-oom" in by_id:
        by_id["missing-set-device"].level = Level.CAUSE
    if "cuda-oom" in by_id:
        first = by_id["cuda-oom"].lines[0]
        if OutOfMemory(first.raw).is_fragmented and not fragmented:
            candidates.append(
                replace_candidate(by_id["cuda-oom"], "cuda-oom-fragmentation", Confidence.LIKELY)
            )
        if _FSDP.search(around(seen)) and _OFFLOADS.search(around(seen)):
            offload = replace_candidate(
                by_id["cuda-oom"], "fsdp-cpu-offload-oom", Confidence.LIKELY
            )
            candidates.append(replace(offload, order=-1))


def replace_candidate(of: Candidate, name: str, confidence: Confidence) -> Candidate:
    """The candidate's lines read as another failure."""
    return replace(of, id=name, confidence=confidence, notes=[])
