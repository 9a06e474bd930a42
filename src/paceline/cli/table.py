"""Plain tables for people, and files that are written only where there is none."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import JobError


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart; the first row is the head.

    >>> print(format_table([("NAME", "N"), ("a", "10")]))
    NAME  N
    a     10
    """
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write a file that is not there yet.

    Raises:
        JobError: `T014`, it is there, or it cannot be written.
    """
    if path.exists() and not force:
        what, fix = f"{path} exists", "give another name, or --force to write over it"
    else:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            what = f"{path} cannot be written: {error.strerror}"
            fix = "give a file in a folder that exists and that you may write to"
        else:
            return
    raise JobError.of(code="T014", what=what, where="--write", fix=fix)
