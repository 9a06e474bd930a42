"""The one printer of what a command does while it works: lines, and one live line."""

import sys
import time
from typing import TextIO

import click

from paceline.record.plain import plain

_LIVE_EVERY_S, _LOG_EVERY_S = 0.1, 10.0
"""The live line is written anew about this often: in a terminal, and in a log file as plain lines.
Guesses."""


class Screen:
    """Prints lines for a person to a stream that may be closed: the command carries on then."""

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
        shown = "\n".join(map(plain, text.split("\n")))  # a program's error may be in it
        self._print(f"{start}{shown}", newline=True)

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
        self._print(f"\r\x1b[2K{text}", newline=False)

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
    click.echo(text, err=True)
