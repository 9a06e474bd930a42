"""What is the cause and what follows from it: `Seen` -> `Diagnosis`.

The order: what prints its own message and is no consequence; an exception of the program; what is a
cause only where nothing nearer is seen; what makes it slow or wrong without a word; consequences.
Within one of these the earliest line wins. See `standing` for what yields to what.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.catalog.failure import Effect, load_failures
from paceline.check.diagnose.conclusion import Cause, Confidence, Consequence, Diagnosis
from paceline.check.diagnose.hang import reasons, stand
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.patterns import Kind, all_patterns, benign
from paceline.check.diagnose.seen import Exit, Raised, Seen
from paceline.check.diagnose.standing import YIELDS, level_of
from paceline.check.diagnose.weak import second_facts
from paceline.check.diagnose.words import OutOfMemory, say, spans, who
from paceline.check.finding import Evidence, Place

_SECONDARY_TYPES = re.compile(
    r"(?:^|\.)(ChildFailedError|SignalException|ProcessExitedException|ProcessRaisedException"
    r"|ActorDiedError|RayActorError|WorkerCrashedError|TrainingFailedError|DistBackendError"
    r"|DistStoreError|DistNetworkError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError"
    r"|EOFError|CalledProcessError|SystemExit|KeyboardInterrupt|Rendezvous\w+|ConnectionError"
    r"|NCCLError|GracefulExit|WorkerGroupError|ControllerError|JobRuntimeEnvSetupFailed)$"
)
"""Exceptions by which a process tells of another's end. Never the cause beside another one."""

_SECONDARY_TEXT = re.compile(
    r"gloo/transport|Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError"
    r"|NCCL communicator was aborted|Socket Timeout|wait timeout after|store->get|heartbeat"
    r"|terminated with (signal|exit)|NCCL error|collective operation timeout"
    r"|returned non-zero exit status"
    r"|Timed out (waiting|initializing)|Stop_waiting response|monitoredBarrier"
)
_ERROR_WEIGHT = re.compile(
    r"(?i)\b(?:fatal|panic|segmentation fault|core dumped|killed|cannot|could not"
    r"|unable|no such|denied|[a-z.]*(?:error|exception):|fail(?:ed|ure)|abort(?:ed|ing)"
    r"|[a-z]+ (?:error|exception)|exception)\b|(?:Error|Exception)\b"
)
_ONLY_WARNS = re.compile(
    r"(?i)\bwarn(?:ing)?\b|\w+Warning\b|\[W\d{3,4}|^W\d{4} |retry"
    r"|will (?:be )?(?:ignored|skip)|falling back|fallback|skipping|\bNCCL INFO\b|\bDEBUG\b"
)
"""A line that says of itself that the run goes on."""
_UNKNOWN_LINES = 8


@dataclass(slots=True)
class _Candidate:
    """A failure that may be the cause."""

    id: str
    level: float
    confidence: Confidence
    lines: list[Line]
    what: str
    count: int = 1
    weight: float = 0.0
    place: str | None = None
    rank: int | None = None
    notes: list[str] = field(default_factory=list)
    title: str | None = None


_QUIET = {Effect.SILENT, Effect.DEGRADED, Effect.WARNING, Effect.INFO, Effect.HANG}


def judge(seen: Seen) -> Diagnosis:
    """Put the causes in order."""
    order = {source.name: number for number, source in enumerate(seen.sources)}
    candidates = [*_printed(seen), *_weak(seen), *_found(seen)]
    _specialise(candidates, seen)
    raised = _exceptions(seen, candidates)
    candidates += raised
    candidates += _hangs(seen, candidates)
    candidates += _cut_off(seen)
    candidates += _ends(seen, candidates)
    candidates = _best_of_each(candidates)
    known = {each.id for each in candidates if each.level < 5}
    for each in candidates:
        if known & YIELDS.get(each.id, frozenset()):
            each.level += 0.5 if each.level != 0 else 2.2
    candidates.sort(key=lambda each: (each.level, -each.weight, _when(each.lines, order, seen)))
    causes = [each for each in candidates if each.level < 5]
    secondary = [each for each in candidates if 5 <= each.level < 6]
    possible = [each for each in candidates if each.level >= 6]
    failed = _has_failed(seen, candidates)
    if failed and causes and causes[0].level >= 4:
        causes, possible = [], [*possible, *causes]  # a hint about speed explains no failure
    if not causes and secondary:
        causes = [_only_symptom(seen, secondary)]
        secondary = [each for each in secondary if each.id != causes[0].id]
    if not causes and not failed:
        causes = [each for each in possible if load_failures()[each.id].effect in _QUIET]
    elif causes or any(each.level < 6.4 for each in possible):
        causes += possible
    found = [_cause(each, seen) for each in causes]
    return Diagnosis(
        causes=found,
        consequences=[
            Consequence(id=each.id, count=each.count, ranks=_ranks(each.lines))
            for each in secondary
        ],
        notes=list(_notes(seen, found)),
        facts=seen.facts,
        unknown=[] if found else _unknown(seen),
        num_ranks=max(seen.ranks) + 1 if seen.ranks else None,
        num_bytes=sum(source.num_bytes for source in seen.sources),
        num_lines=sum(source.num_lines for source in seen.sources),
        num_sources=len(seen.sources),
        has_failed=failed,
        matcher=seen.matcher,
        saturated=tuple(dict.fromkeys(seen.saturated)),
        troubles=[f"{s.trouble}: {s.name}" for s in seen.sources if s.trouble],
    )


def _printed(seen: Seen) -> Iterator[_Candidate]:
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
        line, said = groups[name]
        yield _Candidate(
            id=name,
            level=level_of(failures[name]),
            confidence=_surely(name, lines),
            lines=lines,
            what=say(name, line, said, _ranks(lines)),
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


def _weak(seen: Seen) -> Iterator[_Candidate]:
    """Failures whose lines need a second fact: those that have it, and the rest as possible."""
    failures = load_failures()
    facts = dict(second_facts(seen))
    for name in sorted({each.name for each in seen.sightings.values() if each.weak} - facts.keys()):
        lines = [line for each in seen.sightings_of(name, weak=True) for line, _ in each.lines()]
        lines = [line for line in lines if not benign().search(line.raw)]
        if lines and failures[name].category != "hang" and level_of(failures[name]) < 5:
            yield _Candidate(
                id=name,
                level=6.3 if level_of(failures[name]) < 3 else 6.5,
                confidence=Confidence.POSSIBLE,
                lines=lines,
                what=say(name, lines[0], {}, _ranks(lines)),
            )
        elif lines and level_of(failures[name]) >= 5:
            yield _Candidate(
                id=name,
                level=5.5,
                confidence=Confidence.POSSIBLE,
                lines=lines,
                what=say(name, lines[0], {}, _ranks(lines)),
            )
    for name, fact in facts.items():
        lines = [line for each in seen.sightings_of(name, weak=True) for line, _ in each.lines()]
        said = {
            k: v for each in seen.sightings_of(name, weak=True) for k, v in each.first[0][1].items()
        }
        yield _Candidate(
            id=name,
            level=level_of(failures[name]),
            confidence=Confidence.LIKELY,
            lines=lines,
            what=f"{say(name, lines[0], said, _ranks(lines))}: {fact}",
            count=sum(each.count for each in seen.sightings_of(name, weak=True)),
        )


def _found(seen: Seen) -> Iterator[_Candidate]:
    """What dumps and NCCL's report say."""
    for each in seen.found:
        level = level_of(load_failures()[each.id])
        yield _Candidate(
            id=each.id,
            level=level if each.is_certain or level == 3 else 1.8,
            confidence=Confidence.CERTAIN if each.is_certain else Confidence.LIKELY,
            lines=[each.line],
            what=f"{who(each.ranks)}{each.what}" if each.ranks else each.what,
            place=each.place,
            rank=each.ranks[0] if each.ranks else None,
            title=each.title,
        )


def _specialise(candidates: list[_Candidate], seen: Seen) -> None:
    """Choose between failures that share their message, by its numbers."""
    by_id = {each.id: each for each in candidates if each.confidence is not Confidence.POSSIBLE}
    fragmented = by_id.get("cuda-oom-fragmentation")
    if fragmented and "cuda-oom" in by_id:
        fragmented.lines = by_id["cuda-oom"].lines
        fragmented.level = 0
    if "missing-set-device" in by_id and "cuda-oom" in by_id:
        by_id["missing-set-device"].level = 0
    if "cuda-oom" in by_id:
        first = by_id["cuda-oom"].lines[0]
        if OutOfMemory(first.raw).is_fragmented and not fragmented:
            candidates.append(
                replace_candidate(by_id["cuda-oom"], "cuda-oom-fragmentation", Confidence.LIKELY)
            )


def replace_candidate(of: _Candidate, name: str, confidence: Confidence) -> _Candidate:
    """The same lines read as another failure."""
    return replace(of, id=name, confidence=confidence, notes=[])


def _exceptions(seen: Seen, candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """The exception of the program that came first, unless it is another failure's message."""
    claimed = {(line.source, line.number): each for each in candidates for line in each.lines}
    own: list[Raised] = []
    wrapped: dict[int, str] = {}
    for raised in seen.raised:
        owner = claimed.get((raised.line.source, raised.line.number))
        if owner is not None:
            if owner.place is None and raised.place is not None:
                owner.place = str(raised.place)
                owner.rank = owner.rank if owner.rank is not None else raised.rank
            continue
        name = _failure_in(raised)
        if name is not None:
            wrapped[id(raised)] = name
        if name is not None or not _is_secondary(raised):
            own.append(raised)
    if not own:
        return []
    names = {
        (raised.during.line.number, raised.during.line.source) for raised in own if raised.during
    }
    names |= {
        (raised.caused_by.line.number, raised.caused_by.line.source)
        for raised in own
        if raised.caused_by
    }
    first = min(own, key=lambda each: _raised_when(each, seen))
    while True:  # what it says it came from is nearer; what it wrapped is told with it
        wrapper = next((each for each in own if each.during is first), None)
        if wrapper is None:
            break
        first = wrapper
    source = first
    while source.caused_by is not None and not _is_secondary(source.caused_by):
        source = source.caused_by
    same = [each for each in own if each.type == source.type and _shape(each) == _shape(source)]
    ranks = sorted({each.rank for each in same if each.rank is not None})
    at = f" at {source.place}" if source.place else ""
    exit_rank = ranks[0] if ranks else _rank_of_exit(seen)
    on = who(ranks or ([exit_rank] if exit_rank is not None else []), source.line)
    what = f"{on}{source.text[:300]}{at}"
    name = next((wrapped[id(each)] for each in (source, first) if id(each) in wrapped), None)
    if name is not None:
        what = f"{say(name, source.line, {}, ranks)}: {source.text[:200]}"
    candidate = _Candidate(
        id=name or "user-exception",
        level=level_of(load_failures()[name]) if name else 1,
        confidence=Confidence.CERTAIN,
        lines=[source.line, *(each.line for each in same if each is not source)],
        what=what,
        count=sum(each.count for each in same),
        place=str(source.place) if source.place else None,
        rank=source.rank if source.rank is not None else exit_rank,
    )
    if first.during is not None and not _is_secondary(first.during):
        candidate.notes.append(f"it came up while handling {first.during.text[:120]}")
    return [candidate]


def _failure_in(raised: Raised) -> str | None:
    """The failure that an exception's whole message names, where lines of it were wrapped."""
    if not raised.more:
        return None
    for between in (" ", ""):
        text = between.join([raised.text, *raised.more])
        for pattern in all_patterns():
            if pattern.kind is Kind.LOG and pattern.name != "user-exception":
                failure = load_failures()[pattern.name]
                if level_of(failure) < 3 and pattern.text.search(text):
                    return pattern.name
    return None


def _shape(raised: Raised) -> str:
    return re.sub(r"\d+|0x\w+", "#", raised.message)


def _is_secondary(raised: Raised) -> bool:
    return bool(_SECONDARY_TYPES.search(raised.type) or _SECONDARY_TEXT.search(raised.message))


def _raised_when(raised: Raised, seen: Seen) -> tuple[float, int, int]:
    """By the time its process ended, where the launcher says it; else by its place in the logs."""
    ended = [
        each.line.time_s
        for each in seen.exits
        if each.rank is not None and each.rank == raised.rank and each.line.time_s is not None
    ]
    time_s = raised.line.time_s or raised.header.time_s or (min(ended) if ended else None)
    timed = time_s is not None and all(
        each.line.time_s or each.header.time_s or each.rank in _timed_ranks(seen)
        for each in seen.raised
    )
    names = [source.name for source in seen.sources]
    at = names.index(raised.line.source) if raised.line.source in names else 0
    return (time_s if timed and time_s is not None else 0.0, at, raised.line.number)


def _timed_ranks(seen: Seen) -> set[int]:
    return {e.rank for e in seen.exits if e.rank is not None and e.line.time_s is not None}


def _rank_of_exit(seen: Seen) -> int | None:
    """Of the process that ended first with an error of its own."""
    own = [each for each in seen.exits if each.rank is not None and each.code > 0]
    own.sort(key=lambda each: (each.line.time_s or 0.0, not each.first_observed))
    return own[0].rank if own else None


def _hangs(seen: Seen, candidates: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """What a time-out speaks for, where nothing else is seen."""
    waits = [each for each in candidates if each.id in _WAITS]
    standing = stand(seen)
    if not waits and standing is None:
        return
    if any(each.level < 1.5 for each in candidates):
        return
    timed_out = standing is not None or any(
        re.search(r"(?i)timed ?out|timeout", line.raw) for each in waits for line in each.lines
    )
    if not timed_out:
        yield from _left_early(seen, waits)
        return
    lines = [each.line for each in seen.watched] or waits[0].lines
    best: dict[str, tuple[float, str]] = {}
    for name, weight, why in reasons(seen, standing):
        if name not in best:
            best[name] = (weight, why)
        elif best[name][0] < weight:
            best[name] = (weight, f"{why}; {best[name][1]}")
    odd = (standing.behind or standing.absent) if standing else ()
    for name, (weight, why) in best.items():
        likely = weight >= 1
        yield _Candidate(
            id=name,
            level=2.1 if likely else 6.0,
            confidence=Confidence.LIKELY if likely else Confidence.POSSIBLE,
            lines=lines,
            what=f"{standing.what}; {why}" if standing else why,
            count=len(lines),
            weight=weight,
            rank=odd[0] if odd else None,
        )


_WAITS_FOR_RANK_0 = re.compile(
    r"main_process_first|main_first|local_main|wait_for_everyone|barrier"
)
_BAR_AT_LIMIT = re.compile(r"\[(?:0?9:5\d|10:0\d|29:[45]\d|30:[0-4]\d|59:[45]\d|1:00:[0-4]\d)<")
"""A progress bar that stopped at 10, 30 or 60 minutes: the time-outs of NCCL and gloo, old and
new, as in torch/distributed/constants.py."""


def _cut_off(seen: Seen) -> Iterator[_Candidate]:
    """A traceback that breaks off where a rank waits for rank 0, as a bar nears a limit."""
    for begun in seen.begun:
        waits = any(_WAITS_FOR_RANK_0.search(frame.function) for frame in begun.frames)
        if waits and (bar := _BAR_AT_LIMIT.search(begun.header.raw)):
            yield _Candidate(
                id="rank0-preprocess-timeout",
                level=2.1,
                confidence=Confidence.LIKELY,
                lines=[begun.header, *([begun.last] if begun.last else [])],
                what=f"the work of one rank stands at {bar[0][1:-1]}, near a time-out, while "
                "another stopped in its wait for it",
            )
            return


def _left_early(seen: Seen, waits: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """A rank's connection closed, and no process ended by a signal or an error of its own."""
    closed = [line for each in waits for line in each.lines if "closed by peer" in line.raw]
    if closed and seen.exits and all(each.code in (1, -15) for each in seen.exits):
        yield _Candidate(
            id="uneven-inputs-hang",
            level=2.1,
            confidence=Confidence.LIKELY,
            lines=closed,
            what=f"{who(_ranks(closed))}the peer left without an error while this rank still "
            "trained",
            count=len(closed),
            weight=1.0,
        )


_WAITS = {
    "collective-watchdog-timeout",
    "nccl-works-failed-banner",
    "gloo-peer-closed",
    "store-wait-timeout",
}
"""A rank waited for another."""

_ENDS = {
    -11: "segfault-exit-11",
    -7: "sigbus-exit-7",
    -9: "host-oom-sigkill",
    -1: "sighup-terminal-closed",
}


def _ends(seen: Seen, candidates: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """What the way in which a process ended says."""
    for code, name in _ENDS.items():
        ends = [each for each in seen.exits if each.code == code]
        if not ends:
            continue
        first = min(ends, key=lambda each: (each.line.time_s or 0.0, not each.first_observed))
        known = next((each for each in candidates if each.id == name), None)
        if known is not None:
            known.rank = known.rank if known.rank is not None else first.rank
            continue
        yield _Candidate(
            id=name,
            level=level_of(load_failures()[name]),
            confidence=Confidence.LIKELY,
            lines=[each.line for each in ends],
            what=say(name, first.line, {}, [first.rank] if first.rank is not None else []),
            count=len(ends),
            rank=first.rank,
        )


def _best_of_each(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """One candidate for each failure: the surest, and all its lines."""
    best: dict[str, _Candidate] = {}
    for each in candidates:
        known = best.get(each.id)
        if known is None or (each.level, -each.weight) < (known.level, -known.weight):
            if known is not None and each.confidence is not Confidence.CERTAIN:
                each.lines = known.lines if len(known.lines) > len(each.lines) else each.lines
            best[each.id] = each
    return list(best.values())


def _when(lines: Sequence[Line], order: dict[str, int], seen: Seen) -> tuple[float, int, int]:
    timed = [line.time_s for line in lines if line.time_s is not None]
    several = len(seen.sources) > 1
    first = min(lines, key=lambda line: (order.get(line.source, 0), line.number))
    time_s = min(timed) if timed and several else 0.0
    return (time_s, order.get(first.source, 0), first.number)


def _only_symptom(seen: Seen, secondary: list[_Candidate]) -> _Candidate:
    """Where only consequences are seen: the one that says most of where ranks stood."""
    ranking = ("collective-watchdog-timeout", "store-wait-timeout", "gloo-peer-closed")
    best = min(
        secondary,
        key=lambda each: (
            each.level >= 6,
            ranking.index(each.id) if each.id in ranking else len(ranking),
        ),
    )
    standing = stand(seen)
    if best.id == "collective-watchdog-timeout" and standing is not None:
        odd = standing.behind or standing.absent
        best.what = standing.what
        best.rank = odd[0] if odd else None
    best.confidence = Confidence.POSSIBLE
    return best


def _has_failed(seen: Seen, candidates: Sequence[_Candidate]) -> bool:
    effects = {Effect.FATAL, Effect.HANG, Effect.SECONDARY, Effect.FALLBACK}
    failures = load_failures()
    return bool(
        any(failures[each.id].effect in effects for each in candidates)
        or seen.raised
        or seen.begun
        or seen.found
        or any(each.code not in (0, -2) for each in seen.exits)
        or seen.watched
        or any(_is_grave(each.line) for each in seen.error_lines.values())
    )


def _is_grave(line: Line) -> bool:
    if line.level in {"E", "F"}:
        return True
    if line.level is not None or _ONLY_WARNS.search(line.raw):
        return False
    return bool(_ERROR_WEIGHT.search(line.message))


def _cause(candidate: _Candidate, seen: Seen) -> Cause:
    ranks = _ranks(candidate.lines)
    first = _first_rank(candidate, seen)
    return Cause(
        id=candidate.id,
        confidence=candidate.confidence,
        what="; ".join([candidate.what, *candidate.notes]),
        rank=first[0],
        host=first[1],
        ranks=ranks or ([first[0]] if first[0] is not None else []),
        count=max(candidate.count, 1),
        evidence=[evidence(line) for line in _telling(candidate.lines)],
        place=candidate.place,
        title=candidate.title or load_failures()[candidate.id].title,
    )


def _first_rank(candidate: _Candidate, seen: Seen) -> tuple[int | None, str | None]:
    lines = sorted(
        (line for line in candidate.lines if line.rank is not None),
        key=lambda line: (line.time_s or 0.0, line.number),
    )
    rank = candidate.rank if candidate.rank is not None else (lines[0].rank if lines else None)
    host = next((line.host for line in candidate.lines if line.host and line.rank == rank), None)
    if rank is None:
        rank = _rank_by_exit(candidate, seen)
    if host is None:
        host = next((each.host for each in seen.exits if each.rank == rank and each.host), None)
    if host is None:
        host = next((line.host for line in candidate.lines if line.host), None)
    return rank, host


def _rank_by_exit(candidate: _Candidate, seen: Seen) -> int | None:
    """The rank whose process ended as this failure ends it."""
    wanted = {
        "host-oom-sigkill": -9,
        "segfault-exit-11": -11,
        "sigbus-exit-7": -7,
        "shm-too-small": -7,
    }
    code = wanted.get(candidate.id)
    ends = [
        each
        for each in seen.exits
        if each.rank is not None and (each.code == code if code else each.code > 0)
    ]
    ends.sort(key=lambda each: (each.line.time_s or 0.0, not each.first_observed))
    return ends[0].rank if ends else None


def _ranks(lines: Iterable[Line]) -> list[int]:
    return sorted({line.rank for line in lines if line.rank is not None})


def _telling(lines: Sequence[Line]) -> list[Line]:
    """At most four lines, in order, no two alike."""
    found: dict[str, Line] = {}
    for line in sorted(lines, key=lambda each: (each.time_s or 0.0, each.number)):
        found.setdefault(re.sub(r"0x\w+|\d+", "#", line.message), line)
    return list(found.values())[:4]


def evidence(line: Line) -> Evidence:
    """The line and where it stands."""
    return Evidence(
        where=Place(path=line.source, line=line.number, rank=line.rank, host=line.host),
        text=line.raw.strip(),
    )


def _notes(seen: Seen, causes: Sequence[Cause]) -> Iterator[str]:
    blamed = [each for each in seen.exits if each.first_observed and each.rank is not None]
    if blamed and causes and causes[0].rank is not None and blamed[0].rank != causes[0].rank:
        yield (
            f"torchrun names rank {blamed[0].rank} as the first failure; "
            f"rank {causes[0].rank} is the cause"
        )
    if _interrupted(seen) and not causes:
        yield "the run was interrupted by hand (Ctrl-C)"
    ends = sorted({each.rank for each in seen.exits if each.rank is not None and each.code > 0})
    if causes and not causes[0].ranks and len(ends) > 1:
        yield f"ranks {spans(ends)} ended with an error"


def _interrupted(seen: Seen) -> bool:
    return any(each.type.endswith("KeyboardInterrupt") for each in seen.raised) or any(
        each.code == -2 for each in seen.exits
    )


def _unknown(seen: Seen) -> list[Evidence]:
    """The lines most worth reading where no cause is known: grave ones, first ones, rare ones."""
    lines = sorted(
        seen.error_lines.values(),
        key=lambda each: (not _is_grave(each.line), each.count > 100, each.line.number),
    )
    found = [each.line for each in lines[:_UNKNOWN_LINES]]
    found += [raised.line for raised in seen.raised[: max(0, 3 - len(found))]]
    for begun in seen.begun[:2]:
        found += [begun.header, *([begun.last] if begun.last else [])]
    known = {(line.source, line.number) for line in found}
    ends = [each.line for each in seen.exits if each.code not in (0, -2)]
    found += [line for line in ends[:2] if (line.source, line.number) not in known]
    found.sort(key=lambda line: (line.source, line.number))
    return [evidence(line) for line in found]


def exits_of_rank(exits: Iterable[Exit], rank: int) -> list[int]:
    """How a rank's processes ended."""
    return [each.code for each in exits if each.rank == rank]
