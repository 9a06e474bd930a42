"""What a client may name, and how much of an answer it gets.

Files lie below the working folder or the folder of runs; lists and texts end at a bound, and the
answer says what was left out. Text that a training program wrote is cleaned of what a terminal or
a reader could take for something else.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.record.sanitize import plain

MOST_ROWS = 100
"""Rows of any list in an answer. A guess: a client's context holds no more of use."""

MOST_TEXT = 20_000
"""Characters of any other text in an answer."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


def below(root: Path, name: str) -> Path:
    """The file or folder of that name, which lies below `root` also when links are followed.

    Raises:
        JobError: `V030`, it does not, or the name is none.
    """
    try:
        path = (root / name).resolve()
        is_inside = bool(name.strip()) and path.is_relative_to(root.resolve())
    except (OSError, ValueError, RuntimeError):  # a zero byte, a link to itself
        is_inside = False
    if not is_inside:
        raise JobError.of(
            code="V030",
            what=f"{plain(name)[:200]!r} is not below the folder that this server works in",
            where=str(root),
            fix="name a path relative to that folder; `paceline mcp` works in the folder that it "
            "was started in",
        )
    return path


def run_name(name: str) -> str:
    """The name of a run, or a queue's id of one: no path.

    Raises:
        JobError: `V030`, it is something else.
    """
    if not _RUN.fullmatch(name):
        raise JobError.of(
            code="V030",
            what=f"{plain(name)[:200]!r} is neither a run's name nor a queue's id",
            where="run",
            fix="the tool `runs` lists the names",
        )
    return name


def untrusted(value: Any) -> dict[str, Any]:
    """A value with text of a training program, in a field that says so."""
    return {"untrusted": _cleaned(value)}


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, Mapping):
        return {str(key): _cleaned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each) for each in value]
    return value


def marked(value: Any, names: frozenset[str]) -> Any:
    """The value with each field of these names as `untrusted`, wherever it is."""
    if isinstance(value, Mapping):
        return {
            str(key): untrusted(each) if key in names and each else marked(each, names)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [marked(each, names) for each in value]
    return value


def bounded(answer: Mapping[str, Any], *, most_rows: int = MOST_ROWS) -> dict[str, Any]:
    """The answer with its lists and texts cut; `left_out` has where, and how many there were."""
    left_out: dict[str, int] = {}

    def cut(value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return {str(key): cut(each, f"{where}.{key}") for key, each in value.items()}
        if isinstance(value, str):
            if len(value) > MOST_TEXT:
                left_out[where] = len(value)
            return value[:MOST_TEXT]
        if isinstance(value, Sequence):
            if len(value) > most_rows:
                left_out[where] = len(value)
            return [cut(each, f"{where}[]") for each in value[:most_rows]]
        return value

    found = {key: cut(each, key) for key, each in answer.items()}
    return found | ({"left_out": left_out} if left_out else {})
