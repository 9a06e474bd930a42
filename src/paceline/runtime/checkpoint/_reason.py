"""Why something failed, on one line."""

import os


def plain_reason(error: BaseException) -> str:
    """An error on one line, as the operating system says it where it was one."""
    if isinstance(error, OSError) and error.errno is not None:
        text = os.strerror(error.errno).lower()
        return f"{text}: {error.filename}" if error.filename else text
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
