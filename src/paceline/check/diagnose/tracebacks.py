"""Tracebacks, rank by rank, also when many ranks write between each other's lines; and which of the
program's exceptions is the cause, and which another's echo.
"""

import re
from collections.abc import Mapping, Sequence

from paceline.catalog.failure import load_failures
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.candidate import Candidate, Level, level_of
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.exits import rank_of_exit
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.matcher import Kind, all_patterns
from paceline.check.diagnose.messages import say, who
from paceline.check.diagnose.seen import (
    KEEP_DISTINCT,
    KEEP_RAISED,
    Begun,
    Frame,
    Raised,
    Seen,
)

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_RICH_FRAME = re.compile(r"^[│|] (?P<file>\S+?):(?P<line>\d+) in (?P<function>\S+)")
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:\([A-Za-z_.]+\))?)(?:: ?(?P<message>.*))?$"
)
_NAMED = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|Iteration|NotMet|Group)\b"
)
_CAUSE = re.compile(r"The above exception was the direct cause of")
_DURING = re.compile(r"During handling of the above exception")
_SPAWNED = re.compile(
    r"^-- Process (?P<rank>\d+) terminated with the following (?:error|exception)"
)

_MAX_LINES = 400
"""Lines after which a traceback that has not ended is given up: more than a recursion prints."""

_AFTER_FRAME = 60
"""Lines without a frame, of any writer, after which it is given up."""

_AFTER_END = 8
"""Lines after an exception in which what it came from may be said."""

_PER_WRITER = 60
_IN_ALL = 20_000


class Tracebacks:
    """The open tracebacks of one source."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._open: dict[str, _Open] = {}
        self._ended: dict[str, _Ended] = {}
        self._count: dict[str, int] = {}
        self._kinds: dict[tuple[int | None, int | None, str, str], Raised] = {}
        self._last: tuple[str, int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether lines are wanted."""
        return bool(self._open or self._ended)

    def header(self, line: Line) -> None:
        """A traceback begins."""
        count = self._count.get(line.writer, 0)
        if count >= _PER_WRITER or sum(self._count.values()) >= _IN_ALL:
            return
        self._count[line.writer] = count + 1
        if line.writer in self._open and not self._open[line.writer].frames:
            return
        before = self._ended.pop(line.writer, None)
        self._open[line.writer] = _Open(line, before)

    def alone(self, line: Line) -> None:
        """A line that names an exception without a traceback before it."""
        match = _EXCEPTION.match(line.message)
        if match is None or not _NAMED.search(match["type"]) or not match["message"]:
            return
        if match["type"].endswith("Warning") or self._last == (line.source, line.number):
            return
        self._close(_Open(line, None), line, match)

    def take(self, line: Line) -> None:
        """The next line of the source."""
        if not self.is_open:
            return
        for writer, ended in list(self._ended.items()):
            ended.left -= 1
            if writer == line.writer:
                self._after(ended, line)
            if ended.left <= 0:
                del self._ended[writer]
        for writer, each in list(self._open.items()):
            each.left -= 1
            each.quiet += 1
            if each.left <= 0 or each.quiet > _AFTER_FRAME + 8 * len(self._open):
                self._give_up(self._open.pop(writer))
        mine = self._open.get(line.writer)
        if mine is None:
            return
        message = line.message
        frame = _FRAME.match(message) or _RICH_FRAME.match(message)
        if frame:
            mine.quiet, mine.last = 0, line
            mine.frames.append(
                Frame(
                    file=frame["file"],
                    line=int(frame["line"]),
                    function=(frame["function"] or "<module>").strip(),
                )
            )
            del mine.frames[:-64]
            return
        if not message or message[0] in " \t│╭╰|~^":
            return
        exception = _EXCEPTION.match(message)
        if exception is None or not _is_exception(exception, mine):
            return
        del self._open[line.writer]
        self._close(mine, line, exception)

    def end(self) -> None:
        """The source is over."""
        for each in self._open.values():
            self._give_up(each)
        self._open.clear()
        self._ended.clear()

    def _give_up(self, mine: "_Open") -> None:
        if len(self._seen.begun) < KEEP_DISTINCT:
            self._seen.begun.append(Begun(mine.header, tuple(mine.frames), mine.last))

    def _close(self, mine: "_Open", line: Line, exception: re.Match[str]) -> None:
        before = mine.before
        self._last = (line.source, line.number)
        raised = Raised(
            line=line,
            header=mine.header,
            type=exception["type"],
            message=(exception["message"] or "").strip(),
            frames=tuple(mine.frames),
            rank=before.spawned if before and before.spawned is not None else line.rank,
            caused_by=before.raised if before and before.link == "cause" else None,
            during=before.raised if before and before.link == "during" else None,
        )
        self._ended[line.writer] = _Ended(raised)
        words = re.sub(r"\d+", "#", raised.message)
        kind = (raised.rank, line.local_rank, raised.type, words)
        if kind in self._kinds:
            self._kinds[kind].count += 1
        elif len(self._seen.raised) < KEEP_RAISED:
            self._kinds[kind] = raised
            self._seen.raised.append(raised)

    def _after(self, ended: "_Ended", line: Line) -> None:
        if _CAUSE.search(line.message):
            ended.link = "cause"
            ended.left = _AFTER_END
        elif _DURING.search(line.message):
            ended.link = "during"
            ended.left = _AFTER_END
        elif spawned := _SPAWNED.match(line.message):
            ended.spawned = int(spawned["rank"])
            ended.left = _AFTER_END
        elif line.message.strip() and ended.link is None:
            if not ended.raised.message:
                ended.raised.message = line.message.strip()
            if len(ended.raised.more) < _AFTER_END:
                ended.raised.more.append(line.message.strip()[:400])


class _Open:
    """A traceback that has not ended."""

    def __init__(self, header: Line, before: "_Ended | None") -> None:
        self.header, self.before = header, before
        self.frames: list[Frame] = []
        self.last: Line | None = None
        self.left = _MAX_LINES
        self.quiet = 0


class _Ended:
    """One that has, and may yet be linked to the next."""

    def __init__(self, raised: Raised) -> None:
        self.raised = raised
        self.left = _AFTER_END
        self.link: str | None = None
        self.spawned: int | None = None


def _is_exception(match: re.Match[str], mine: _Open) -> bool:
    """A line such as `KeyError: 'x'`, not one such as `step: 3` of another writer."""
    if _NAMED.search(match["type"]):
        return True
    last = match["type"].rpartition(".")[2]
    return bool(mine.frames) and mine.quiet <= 4 and last[:1].isupper()


_SECONDARY = read_shipped("log_lines.toml")["secondary"]
_SECONDARY_TYPES, _SECONDARY_TEXT = re.compile(_SECONDARY["types"]), re.compile(_SECONDARY["text"])


def exceptions(seen: Seen, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The exception of the program that came first, unless it is another failure's message."""
    claimed: dict[tuple[str, int], list[Candidate]] = {}
    for each in candidates:
        for line in each.lines:
            claimed.setdefault((line.source, line.number), []).append(each)
    own: list[Raised] = []
    wrapped: dict[int, str] = {}
    for raised in seen.raised:
        owners = claimed.get((raised.line.source, raised.line.number), [])
        for owner in owners:
            if owner.place is None and raised.place is not None:
                owner.place = str(raised.place)
                owner.rank = owner.rank if owner.rank is not None else raised.rank
                if owner.id == "cuda-oom" and (asked_for := _asked_for(raised)):
                    owner.what += f". It was asked for {asked_for}"
        if owners:
            continue
        name = _failure_in(raised)
        if name is not None:
            wrapped[id(raised)] = name
        if name is not None or not _is_secondary(raised):
            own.append(raised)
    if not own:
        return []
    first = min(own, key=lambda each: _raised_when(each, seen))
    while True:  # on to the exception that was raised while this one was handled
        wrapper = next((each for each in own if each.during is first), None)
        if wrapper is None:
            break
        first = wrapper
    source = first
    while source.caused_by is not None and not _is_secondary(source.caused_by):
        source = source.caused_by
    same = [each for each in own if each.type == source.type and _kind_of(each) == _kind_of(source)]
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


def _asked_for(raised: Raised) -> str | None:
    """What memory that was not there was for; None where no frame says it."""
    for frame in map(str, reversed(raised.frames)):
        for name, form in _ASKED_FOR.items():
            if re.search(form, frame):
                return name
    return None


_ASKED_FOR: Mapping[str, str] = read_shipped("log_lines.toml")["asked_for"]


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


def _kind_of(raised: Raised) -> str:
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
