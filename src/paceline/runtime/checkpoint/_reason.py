"""Why something failed, on one line."""

import os

from paceline.errors import reason_of


def plain_reason(error: BaseException) -> str:
    """An error on one line, as the operating system says it where it was one."""
    if isinstance(error, OSError) and error.errno is not None:
        text = os.strerror(error.errno).lower()
        return f"{text}: {error.filename}" if error.filename else text
    return reason_of(error)
