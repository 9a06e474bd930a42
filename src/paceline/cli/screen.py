"""The one printer of what people read: answers as wide as the terminal, in few colours, and what a
command does while it works, lines and one live line.
"""

import os
import re
import shutil
import sys
import time
from typing import TextIO

import click

from paceline.record.sanitize import plain
from paceline.report.table import COLUMNS, UNBOUNDED, filled

_LIVE_EVERY_S, _LOG_EVERY_S = 0.1, 10.0
"""The live line is written anew about this often: in a terminal, and in a log file as plain lines.
Guesses."""


class Screen:
    """Prints lines for a person to a stream that may be closed: the command continues then."""

    def __init__(self, *, to_stderr: bool = True) -> None:
        self._stream: TextIO = sys.stderr if to_stderr else sys.stdout
        self._is_terminal = self._stream.isatty()
        self._is_read = True
        self._has_live = self._is_torn = False
        self._shown_at = time.monotonic()

    def line(self, text: str) -> None:
        """Print a line. In a terminal it takes the place of the live line."""
        start = "\r\x1b[2K" if self._has_live else "\n" if self._is_torn else ""
        self._has_live = self._is_torn = False
        shown = list(map(plain, text.split("\n")))  # a program's error may be in it
        if self._is_terminal:
            columns = _columns_of(self._stream)
            shown = [part for line in shown for part in fitted(line, columns)]
        if has_colour(self._stream):
            shown = list(map(painted, shown))
        self._print(start + "\n".join(shown), newline=True)

    def is_live_due(self) -> bool:
        """Whether enough time has passed since the beginning, or since the live line was shown."""
        wait_s = _LIVE_EVERY_S if self._is_terminal else _LOG_EVERY_S
        return time.monotonic() - self._shown_at >= wait_s

    def live(self, text: str) -> None:
        """Show where the work is: over the last such text in a terminal, else as a line."""
        self._shown_at = time.monotonic()
        if not self._is_terminal:
            self.line(text)
            return
        self._has_live = True
        self._print(f"\r\x1b[2K{text[: _columns_of(self._stream) - 1]}", newline=False)

    def output(self, content: bytes) -> None:
        """Print what a program has printed, as it is; it may end in the middle of a line."""
        self._is_torn = not content.endswith((b"\n", b"\r"))
        self._print(content, newline=False)

    def end_live(self) -> None:
        """Leave the live line, or what a program has begun, as it is: a new line begins."""
        if self._has_live or self._is_torn:
            self._has_live = self._is_torn = False
            self._print("", newline=True)

    def _print(self, text: str | bytes, *, newline: bool) -> None:
        """A reader that has left (`| head`, a closed terminal) does not end the command."""
        if self._is_read:
            try:
                click.echo(text, file=self._stream, nl=newline)
            except OSError:
                self._is_read = False


def say(text: str) -> None:
    """Print a line about the work on standard error, which is never an answer."""
    show(text, err=True)


def show(text: str, *, err: bool = False) -> None:
    """Print lines for a person, none wider than the terminal, in colour where it has any. What no
    terminal shows keeps its lines, to be searched for."""
    stream = sys.stderr if err else sys.stdout
    paints, fits = has_colour(stream), not err or _is_terminal(stream)
    columns = _columns_of(stream)
    for line in map(plain, text.split("\n")):  # a log's escape sequences may be in it
        for part in fitted(line, columns) if fits else [line]:
            click.echo(painted(part) if paints else part, err=err)


def take_terminal() -> None:
    """From now on screens are as wide as this terminal, or as COLUMNS asks; in a pipe or a file
    nothing is wrapped or left out."""
    is_bounded = "COLUMNS" in os.environ or _is_terminal(sys.stdout)
    columns = max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    COLUMNS.set(columns if is_bounded else UNBOUNDED)


_NARROWEST = 60
"""Columns below which a terminal wraps the lines itself: labels and figures need as many."""


def _columns_of(stream: TextIO | None) -> int:
    """Characters of a line there: standard error may be a terminal though the answer is piped."""
    columns = COLUMNS.get()
    if columns != UNBOUNDED or stream is None or not stream.isatty():
        return columns
    return max(_NARROWEST, os.get_terminal_size(stream.fileno()).columns)


def fitted(line: str, columns: int) -> list[str]:
    """The line in pieces that fit; what follows begins under its text, or two spaces in.

    >>> fitted("short", 80)
    ['short']
    """
    if len(line) <= columns:
        return [line]
    label = _LABEL.match(line)
    indent = label.end() if label else len(line) - len(line.lstrip()) + 2
    return filled(line, columns, later=" " * indent)


_LABEL = re.compile(r" *[^ ](?:[^ ]| (?! )){0,24} {2,}(?=[^ ])")
"""The first column of a line: at most 25 characters, and two spaces behind it."""


def has_colour(stream: TextIO | None) -> bool:
    """Whether what is printed there is read on a terminal whose user wants colours
    (no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and _is_terminal(stream)


def _is_terminal(stream: TextIO | None) -> bool:
    """Python has no stream where it was closed before the start (`>&-`)."""
    return stream is not None and stream.isatty()


_RED, _YELLOW, _BOLD = "31", "33", "1"
_PAINTS: tuple[tuple[str, str], ...] = (
    (r"(?:[A-Z]\d{3}|Error|error)(?=: )", _RED),
    (r" *(?:error|fails?|FAIL|failed|wrong|cause|damaged|DAMAGED|OVER)(?=:?  )", _RED),
    (r" *(?:warning|caution|unknown|unsure|changed)(?=:?  )", _YELLOW),
    (r"(?:warning|note)(?=: )", _YELLOW),
    (r"[A-Z$][A-Z0-9$/ _?-]*(?:  +[A-Z$][^a-z]*)+$", _BOLD),
    (r"(?=.{11} [^ ])[A-Za-z](?:[A-Za-z -]{0,9}[A-Za-z])?(?= )", _BOLD),
    (r"  (?:fix|where)(?=: )", _BOLD),
)
"""The beginning of a line -> its colour: failures, warnings, heads of tables, labels before the
twelfth column. The first that matches is taken."""


def painted(line: str) -> str:
    """The line with the colour of what it begins with.

    >>> painted("warning     the disk is nearly full")
    '\\x1b[33mwarning\\x1b[0m     the disk is nearly full'
    """
    for pattern, colour in _PAINTS:
        if found := re.match(pattern, line):
            return f"\x1b[{colour}m{found[0]}\x1b[0m{line[found.end() :]}"
    return line
