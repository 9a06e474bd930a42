"""Lines of a rank's log as plain text."""

import re

_MOST_CHARACTERS = 4096
"""Of a line. A guess: what a person reads on a page."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of text."""


def plain(line: str) -> str:
    """A line without colours, control or direction characters.

    >>> plain("\\x1b[31m20%\\x1b[0m")
    '20%'
    """
    return _INVISIBLE.sub("\ufffd", _ESCAPES.sub("", line))[:_MOST_CHARACTERS]
