"""The exception of the program that came first, and whether it is the cause or another's echo."""

import re
from collections.abc import Sequence

from paceline.catalog.failure import load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.candidate import Candidate
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.exit_causes import rank_of_exit
from paceline.check.diagnose.messages import say, who
from paceline.check.diagnose.patterns import Kind, all_patterns
from paceline.check.diagnose.precedence import Level, level_of
from paceline.check.diagnose.seen import Raised, Seen

_ROWS = read_shipped("log_lines.toml")["secondary"]
_SECONDARY_TYPES, _SECONDARY_TEXT = re.compile(_ROWS["types"]), re.compile(_ROWS["text"])


def exceptions(seen: Seen, candidates: Sequence[Candidate]) -> list[Candidate]:
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
    exit_rank = ranks[0] if ranks else rank_of_exit(seen)
    on = who(ranks or ([exit_rank] if exit_rank is not None else []), source.line)
    what = f"{on}{source.text[:300]}{at}"
    name = next((wrapped[id(each)] for each in (source, first) if id(each) in wrapped), None)
    if name is not None:
        what = f"{say(name, source.line, {}, ranks)}: {source.text[:200]}"
    candidate = Candidate(
        id=name or "user-exception",
        level=level_of(load_failures()[name]) if name else Level.EXCEPTION,
        confidence=Confidence.CERTAIN,
        lines=[source.line, *(each.line for each in same if each is not source)],
        what=what,
        count=sum(each.count for each in same),
        place=str(source.place) if source.place else None,
        rank=source.rank if source.rank is not None else exit_rank,
    )
    if first.during is not None and not _is_secondary(first.during):
        candidate.notes.append(f"it was raised while handling {first.during.text[:120]}")
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
                if level_of(failure) < Level.QUIET and pattern.text.search(text):
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
