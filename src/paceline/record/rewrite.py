"""Changing a person's own file: a copy of what it was stays beside it."""

import shutil
from pathlib import Path

from paceline.record.lines import write_whole


def rewrite(path: Path, data: bytes) -> Path:
    """Put new content into a file, whole or not at all; the copy of the old one, `NAME.orig`.

    A copy that is there already stays: the new one is `NAME.orig.1` and so on.

    Raises:
        OSError: It cannot be read or written.
    """
    path = path.resolve()  # a link stays a link
    copy = path.with_name(path.name + ".orig")
    number = 0
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.orig.{number}")
    shutil.copy2(path, copy)
    try:
        write_whole(path, data)
    except OSError:
        copy.unlink()
        raise
    shutil.copymode(copy, path)
    return copy
