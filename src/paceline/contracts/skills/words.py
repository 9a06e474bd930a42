"""The line of a program's output that says why it failed, and a problem in a request."""

import re

from paceline.errors import Problem

_ERROR = re.compile(r"^(\[rank\d+\]:? ?)?[A-Za-z_.]*(Error|Exception|Exit|Interrupt)\b.*")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def last_words(text: str) -> str:
    """The last line that names an exception, else the last one that says anything.

    >>> last_words("Traceback\\n  x\\nValueError: no\\nE1121 torch: failed\\n")
    'ValueError: no'
    """
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["it said nothing"])[-1][:400]


def problem(key: str, what: str, fix: str) -> Problem:
    """A value of a request that the skill cannot have."""
    return Problem(code="H033", what=what, where=key, fix=fix)
