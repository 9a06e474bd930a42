"""Why a script ended: the last lines of the traceback of the rank that failed first.

Pure: it is handed what the ranks have printed. `paceline diagnose` reads the same logs for causes;
this only finds the text to show at once.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.control.error_texts import names_lost_peer
from paceline.control.script_run import Raised
from paceline.record.sanitize import plain

MAX_BYTES = 256 << 10
"""Read from the end of a rank's log: a deep recursion prints 1,000 frames, about 100 kB."""

_SHOWN = 12
"""Lines of a traceback that are shown: the last four frames, mostly, and the exception."""

_HEADER = re.compile(r"(?P<prefix>\[rank\d+\]: ?)?Traceback \(most recent call last\):")
"""torch's excepthook puts `[rank1]: ` before every line (torch 2.13, distributed_c10d.py)."""

_MOST_WORDS = 500
"""Characters of the line that names the error, which is shown in several places. A guess."""

_ERROR = re.compile(r"(?i)error|fatal|exception|abort|not found|no such")
_PLACE = re.compile(r'\s*File "(.+)", line (\d+)$')
"""Where a syntax error is; a frame's line goes on with the function's name."""

_CAUSED = "The above exception was the direct cause"
_TAKEN = ("Address already in use", "EADDRINUSE")
"""A port that another process took meanwhile: the next start has another one."""


def first_failure(printed: Mapping[int, str], ended: int) -> Raised | None:
    """What ended the attempt: the words of the rank that ended, or of the one it lost.

    Args:
        ended: The rank whose process ended first. Where it only reports that another rank is gone,
            another rank with an exception of its own is the cause.
    """
    first = _ending(ended, plain_lines(printed.get(ended, "")))
    if first is None or first.words is None or not names_lost_peer(first.words):
        return first
    for rank, text in sorted(printed.items()):
        other = _ending(rank, plain_lines(text)) if rank != ended and _HEADER.search(text) else None
        if other and other.words and not names_lost_peer(other.words):
            return other
    return replace(first, is_passing=True)


def plain_lines(text: str) -> str:
    """The text of a terminal that knows no colours, titles or directions."""
    return "\n".join(plain(line.rpartition("\r")[2]) for line in text.splitlines())


def _ending(rank: int, printed: str) -> Raised | None:
    headers = list(_HEADER.finditer(printed))
    if not headers:
        lines = _without_header(printed)
        words = lines[-1].strip() if lines and _ERROR.search(lines[-1]) else None
    else:
        root = len(headers) - 1
        while root and _CAUSED in printed[headers[root - 1].end() : headers[root].start()]:
            root -= 1  # the exception that the others were raised from
        lines, words = _traceback(printed[headers[root].start() :], headers[root]["prefix"] or "")
    if words is not None and (place := _syntax_error_at(lines)):
        words = f"{words} ({place})"
    is_passing = words is not None and any(text in words for text in _TAKEN)
    return Raised(rank=rank, lines=lines, words=words, is_passing=is_passing) if lines else None


def _traceback(text: str, prefix: str) -> tuple[tuple[str, ...], str | None]:
    """From its header to its exception, with the indented lines of its message; the exception."""
    found: list[str] = []
    words = None
    for line in text.splitlines():
        line = line.removeprefix(prefix).rstrip()
        is_indented = line[:1] in ("", " ", "\t")
        if words is not None and (not is_indented or not line):
            break
        if found and not is_indented:
            words = line[:_MOST_WORDS]
        if line:
            found.append(line)
    return tuple(found[-_SHOWN:]), words


def _syntax_error_at(lines: Sequence[str]) -> str:
    """File and line of a syntax error, which Python prints above it; empty for other ends."""
    if not re.match(r"\w*(SyntaxError|IndentationError|TabError)\b", lines[-1].strip()):
        return ""
    places = [found for line in lines if (found := _PLACE.match(line))]
    return f"{places[-1][1]}:{places[-1][2]}" if places else ""


def _without_header(printed: str) -> tuple[str, ...]:
    """A syntax error, which has no header, or whatever the process printed last."""
    lines = [line.rstrip() for line in printed.splitlines()]
    return tuple([line for line in lines if line][-_SHOWN // 2 :])
