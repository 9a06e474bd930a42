"""The line of a program's output that says why it failed."""

import re

_ERROR = re.compile(r"^(\[rank\d+\]:? ?)?[A-Za-z_.]*(Error|Exception|Exit|Interrupt)\b.*")


def last_words(text: str) -> str:
    """The last line that names an exception, else the last one that says anything.

    >>> last_words("Traceback\\n  x\\nValueError: no\\nE1121 torch: failed\\n")
    'ValueError: no'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["it said nothing"])[-1][:400]
