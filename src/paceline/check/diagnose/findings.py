"""How candidates are told: with their rank, host and lines; what else is worth a word."""

import re
from collections.abc import Iterator, Sequence

from paceline.catalog.failure import load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.candidate import Candidate, ranks_of
from paceline.check.diagnose.conclusion import Cause
from paceline.check.diagnose.exit_causes import rank_of_exit
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.messages import spans
from paceline.check.diagnose.seen import Seen
from paceline.check.finding import Evidence, Place

_ROWS = read_shipped("log_lines.toml")["unknown"]
_ERROR_WEIGHT, _ONLY_WARNS = re.compile(_ROWS["grave"]), re.compile(_ROWS["warns"])
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
    if seen.has_finished and causes:
        yield "the run trained to its end despite it"
    if _interrupted(seen) and not causes:
        yield "the run was interrupted by hand (Ctrl-C)"
    ends = sorted({each.rank for each in seen.exits if each.rank is not None and each.code > 0})
    if causes and not causes[0].ranks and len(ends) > 1:
        yield f"ranks {spans(ends)} ended with an error"


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
