"""The last lines of a rank's log, as plain text."""

import os
import re
from pathlib import Path

_TAIL_BYTES = 256 << 10
_MOST_LINES = 200
_MOST_CHARACTERS = 4096
"""Of a line. All three are guesses: what a person reads on a page."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of text."""


def last_lines(path: Path) -> list[str] | None:
    """The last lines of a file; None where it is none, or a link that may lead elsewhere."""
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        content = file.read(_TAIL_BYTES)
    lines = content.decode("utf-8", "replace").split("\n")
    return [plain(line) for line in lines[-_MOST_LINES - 1 :]]


def plain(line: str) -> str:
    """A line as a terminal would leave it, without colours, control or direction characters.

    >>> plain("10%\\r\\x1b[31m20%\\x1b[0m")
    '20%'
    """
    shown = line.rstrip("\r").rpartition("\r")[2]
    return _INVISIBLE.sub("\ufffd", _ESCAPES.sub("", shown))[:_MOST_CHARACTERS]
