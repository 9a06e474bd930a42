"""What is the cause and what follows from it: `Seen` -> `Diagnosis`.

The order: what prints its own message and is no consequence; an exception of the program; what is a
cause only where nothing nearer is seen; what makes it slow or wrong without a word; consequences.
Within one of these the earliest line wins. See `candidate` for what yields to what.
"""

import re
from collections.abc import Iterator, Sequence

from paceline.catalog.failure import Effect, load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.candidate import (
    GENERAL,
    YIELDS,
    Candidate,
    Level,
    best_of_each,
    ranks_of,
)
from paceline.check.diagnose.conclusion import (
    MAX_SHOWN,
    Cause,
    Confidence,
    Consequence,
    Diagnosis,
    Resemblance,
)
from paceline.check.diagnose.exits import ended, rank_of_exit
from paceline.check.diagnose.hang import cut_off, hangs, only_symptom
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.printed import concluded, printed, specialise, weakly_printed
from paceline.check.diagnose.seen import Seen
from paceline.check.diagnose.symptoms import look_alikes, possible_causes
from paceline.check.diagnose.tracebacks import exceptions
from paceline.check.finding import Evidence, Place

_QUIET = {Effect.SILENT, Effect.DEGRADED, Effect.WARNING, Effect.INFO, Effect.HANG}


def judge(seen: Seen) -> Diagnosis:
    """Put the causes in order."""
    order = {source.name: number for number, source in enumerate(seen.sources)}
    candidates = [*printed(seen), *weakly_printed(seen), *concluded(seen)]
    specialise(candidates, seen)
    raised = exceptions(seen, candidates)
    candidates += raised
    candidates += hangs(seen, candidates)
    candidates += cut_off(seen)
    candidates += ended(seen, candidates)
    candidates = best_of_each(candidates)
    known = {each.id for each in candidates if each.level < Level.FOLLOWS}
    for each in candidates:
        if known & YIELDS.get(each.id, frozenset()):
            each.level, each.order = max(each.level, Level.GENERAL), 1
    candidates.sort(key=lambda each: (each.level, each.order, _when(each.lines, order, seen)))
    causes = [each for each in candidates if each.level < Level.FOLLOWS]
    secondary = [each for each in candidates if Level.FOLLOWS <= each.level < Level.POSSIBLE]
    possible = [each for each in candidates if each.level >= Level.POSSIBLE]
    failed = _has_failed(seen, candidates)
    if failed and causes and causes[0].level >= Level.MINOR:
        stops = [each for each in causes if load_failures()[each.id].effect is Effect.HANG]
        causes, possible = [], [*possible, *stops]  # a hint about speed explains no failure
    causes, possible = _what_ends_a_run(causes, possible)
    if failed:
        possible = _joined([*possible, *possible_causes(seen, candidates)], causes)
        possible.sort(key=lambda each: (each.level, each.order))
    if causes and causes[0].id in GENERAL and len(possible) >= MAX_SHOWN - 1:
        causes, possible = [], _behind_first(possible, causes)
    if not causes and secondary and not any(each.check for each in possible):
        causes = [only_symptom(secondary)]
        secondary = [each for each in secondary if each.id != causes[0].id]
    if not causes and not failed:
        causes = [each for each in possible if each.check or _is_quiet(each)]
    elif causes or any(each.level is Level.POSSIBLE or each.check for each in possible):
        causes += possible
    found = [cause(each, seen) for each in causes]
    return Diagnosis(
        causes=found,
        consequences=[
            Consequence(id=each.id, count=each.count, ranks=ranks_of(each.lines))
            for each in secondary
        ],
        notes=list(notes(seen, found)),
        facts=seen.facts,
        nccl=seen.nccl_fields,
        unknown=[] if found else unknown(seen),
        resembling=_resembling(seen, causes) if failed else [],
        num_ranks=max(seen.ranks) + 1 if seen.ranks else None,
        only_rank=min(seen.ranks) if len(seen.ranks) == len(seen.sources) == 1 else None,
        num_bytes=sum(source.num_bytes for source in seen.sources),
        num_lines=sum(source.num_lines for source in seen.sources),
        num_sources=len(seen.sources),
        has_failed=failed,
        saturated=tuple(dict.fromkeys(seen.saturated)),
        troubles=[f"{s.trouble}: {s.name}" for s in seen.sources if s.trouble],
    )


def _is_quiet(candidate: Candidate) -> bool:
    """Whether it does harm without ending a run."""
    return load_failures()[candidate.id].effect in _QUIET


def _what_ends_a_run(
    causes: list[Candidate], possible: list[Candidate]
) -> tuple[list[Candidate], list[Candidate]]:
    """What only makes a run slow, behind what may have ended it."""
    effects = {each.id: load_failures()[each.id].effect for each in (*causes, *possible)}
    ends = any(effects[each.id] is Effect.FATAL for each in possible)
    if not ends or any(effects[each.id] is not Effect.DEGRADED for each in causes):
        return causes, possible
    for each in causes:
        each.level, each.confidence = Level.FITS, Confidence.POSSIBLE
    return [], [*possible, *causes]


def _behind_first(possible: Sequence[Candidate], general: list[Candidate]) -> list[Candidate]:
    """What only says that something failed, behind the two likeliest reasons for it."""
    general[0].confidence = Confidence.POSSIBLE
    return [*possible[: MAX_SHOWN - 1], *general, *possible[MAX_SHOWN - 1 :]]


def _joined(possible: Sequence[Candidate], causes: Sequence[Candidate]) -> list[Candidate]:
    """Each possible cause once, with what every reader says of it; none that is a cause already."""
    found: dict[str, Candidate] = {}
    for each in possible:
        known = found.setdefault(each.id, each)
        known.check = known.check or each.check
        if each.level < known.level:
            known.level, known.order = each.level, each.order
    names = {each.id for each in causes}
    return [each for each in found.values() if each.id not in names]


def _resembling(seen: Seen, causes: Sequence[Candidate]) -> list[Resemblance]:
    """What else the words of its lines are like, where no pattern of a failure knows them."""
    if causes and causes[0].id != "user-exception":
        return []
    ends = {(each.line.source, each.line.number) for each in seen.exits}
    lines = [each.line for each in seen.raised]
    if not causes:
        lines += [each.line for each in seen.error_lines.values() if is_grave(each.line)]
    lines = [line for line in lines if (line.source, line.number) not in ends]
    names = {each.id for each in causes}
    return [
        Resemblance(id=name, evidence=evidence(line), covered=covered)
        for name, line, covered in look_alikes(lines, most=MAX_SHOWN + len(names))
        if name not in names
    ][: max(0, MAX_SHOWN - len(names))]


def _when(lines: Sequence[Line], order: dict[str, int], seen: Seen) -> tuple[float, int, int]:
    timed = [line.time_s for line in lines if line.time_s is not None]
    several = len(seen.sources) > 1
    first = min(lines, key=lambda line: (order.get(line.source, 0), line.number))
    time_s = min(timed) if timed and several else 0.0
    return (time_s, order.get(first.source, 0), first.number)


def _only_informs(candidate: Candidate) -> bool:
    """Whether it is possible and no more, and its lines are said by the way: nothing has failed."""
    is_possible = candidate.confidence is Confidence.POSSIBLE
    return is_possible and all(
        line.level in {"I", "D"} or "NCCL INFO" in line.raw for line in candidate.lines
    )


def _has_failed(seen: Seen, candidates: Sequence[Candidate]) -> bool:
    effects = {Effect.FATAL, Effect.HANG, Effect.SECONDARY, Effect.FALLBACK}
    failures = load_failures()
    return bool(
        any(failures[each.id].effect in effects and not _only_informs(each) for each in candidates)
        or seen.raised
        or seen.begun
        or any(each.check is None for each in seen.found)
        or any(each.code not in (0, -2) for each in seen.exits)
        or seen.watched
        or any(is_grave(each.line) for each in seen.error_lines.values())
    )


_UNKNOWN = read_shipped("log_lines.toml")["unknown"]
_ERROR_WEIGHT, _ONLY_WARNS = re.compile(_UNKNOWN["grave"]), re.compile(_UNKNOWN["warns"])
_UNKNOWN_LINES = 8


def cause(candidate: Candidate, seen: Seen) -> Cause:
    """A candidate with its rank and host, and the lines that show it."""
    ranks = ranks_of(candidate.lines)
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
        check=candidate.check,
        title=candidate.title or load_failures()[candidate.id].title,
    )


def _first_rank(candidate: Candidate, seen: Seen) -> tuple[int | None, str | None]:
    lines = sorted(
        (line for line in candidate.lines if line.rank is not None),
        key=lambda line: (line.time_s or 0.0, line.number),
    )
    rank = candidate.rank if candidate.rank is not None else (lines[0].rank if lines else None)
    host = next((line.host for line in candidate.lines if line.host and line.rank == rank), None)
    if rank is None:
        rank = rank_of_exit(seen, candidate.id)
    if host is None:
        host = next((each.host for each in seen.exits if each.rank == rank and each.host), None)
    if host is None:
        host = next((line.host for line in candidate.lines if line.host), None)
    return rank, host


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


def notes(seen: Seen, causes: Sequence[Cause]) -> Iterator[str]:
    """What else is worth a word: a launcher that names a victim, a run ended by hand."""
    blamed = [each for each in seen.exits if each.first_observed and each.rank is not None]
    if blamed and causes and causes[0].rank is not None and blamed[0].rank != causes[0].rank:
        yield (
            f"torchrun names rank {blamed[0].rank} as the first failure; "
            f"rank {causes[0].rank} is the cause"
        )
    if blamed and not (causes and causes[0].confidence is Confidence.CERTAIN):
        rank, code = blamed[0].rank, blamed[0].code
        if code > 0 and rank not in seen.ranks | {each.rank for each in seen.sources}:
            yield f"rank {rank} ended first, with exit code {code}: give its log, which has why"
    if seen.has_finished and causes:
        yield "the run trained to its end despite it"
    if _interrupted(seen) and not causes:
        yield "the run was interrupted by hand (Ctrl-C)"


def _interrupted(seen: Seen) -> bool:
    return any(each.type.endswith("KeyboardInterrupt") for each in seen.raised) or any(
        each.code == -2 for each in seen.exits
    )


def unknown(seen: Seen) -> list[Evidence]:
    """The lines most worth reading where no cause is known: grave ones, first ones, rare ones."""
    lines = sorted(
        seen.error_lines.values(),
        key=lambda each: (not is_grave(each.line), each.count > 100, each.line.number),
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


def is_grave(line: Line) -> bool:
    """Whether a line that no pattern knows says that something failed."""
    if line.level in {"E", "F"}:
        return True
    if line.level is not None or _ONLY_WARNS.search(line.raw):
        return False
    return bool(_ERROR_WEIGHT.search(line.message))
