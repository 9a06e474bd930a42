"""Write `[efficiencies.NAME]` into a catalog file, and leave every other line of it as it is.

What is written stands between two comments, by which the next calibration finds it again.
"""

import errno
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import JobError


def write_measured(
    path: Path, name: str, row: Mapping[str, Any], comments: Sequence[str], *, force: bool
) -> None:
    """Put a measured table into a file, new or with other tables.

    Args:
        path: The catalog file.
        name: Accelerator in the catalog.
        comments: Lines above it: who, when, how well it fits.
        force: Whether a table of that name that was written by hand is replaced.

    Raises:
        JobError: `T016`, the file is not TOML, or has the table and is not to be changed, or
            cannot be written.
    """
    with _told(path):
        text = _merged(path, name, format_measured(name, row, comments), force=force)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def check_writable(path: Path, name: str, *, force: bool) -> None:
    """Find out before a minute of measuring, not after it.

    Raises:
        JobError: As `write_measured`.
    """
    with _told(path):
        _merged(path, name, format_measured(name, {"sustained": 1.0}, ()), force=force)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "you may not write there")


def _merged(path: Path, name: str, section: str, *, force: bool) -> str:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    return merge_measured(old, name, section, force=force)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What goes wrong inside, as a problem."""
    try:
        yield
    except ValueError as error:  # tomllib's and Unicode's errors are too
        what = f"{path}: {error}"
        fix = "correct it there, or give another file with --out"
    except FileExistsError as error:
        what = f"{path}: {error}"
        fix = "--force replaces it, --out FILE writes elsewhere"
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror}"
        fix = "give a file in a folder that exists and that you may write to"
    else:
        return
    raise JobError.of(code="T016", what=what, where="--out", fix=fix)


def format_measured(name: str, row: Mapping[str, Any], comments: Sequence[str]) -> str:
    """The table as TOML, with its comments.

    >>> print(format_measured("cpu", {"backward": 0.5, "matmul": {"fp32": {"share": 1.1}}}, ["x"]))
    # >>> paceline calibrate cpu: written anew by the next calibration
    # x
    [efficiencies.cpu]
    backward = 0.5
    <BLANKLINE>
    [efficiencies.cpu.matmul.fp32]
    share = 1.1
    # <<< paceline calibrate cpu
    <BLANKLINE>
    """
    lines = [
        f"{_BEGIN} {name}: written anew by the next calibration",
        *(f"# {line}" for line in comments),
        *_table(f"efficiencies.{_key(name)}", row),
        f"{_END} {name}",
    ]
    return "\n".join(lines) + "\n"


_BEGIN, _END = "# >>> paceline calibrate", "# <<< paceline calibrate"


def _table(head: str, row: Mapping[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in row.items() if not isinstance(value, Mapping)}
    inner = {key: value for key, value in row.items() if isinstance(value, Mapping)}
    if plain:
        yield f"[{head}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {json.dumps(value)}"
    for number, (key, value) in enumerate(inner.items()):
        if plain or number:
            yield ""
        yield from _table(f"{head}.{_key(key)}", value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def merge_measured(text: str, name: str, section: str, *, force: bool) -> str:
    """A file's text with the section in it: in the place of the last one, or at the end.

    Raises:
        FileExistsError: The table is there, was written by hand, and `force` is not given.
        ValueError: The text is not TOML, or its table stands where no line begins it.
    """
    tables = tomllib.loads(text)
    has_table = name in tables.get("efficiencies", {})
    begin, end = _lines_of(text, name)
    lines = text.splitlines(keepends=True)
    if begin is not None and end is not None:
        merged = "".join([*lines[:begin], section, *lines[end + 1 :]])
    else:
        if has_table and not force:
            raise FileExistsError(f"[efficiencies.{name}] is there, and was written by hand")
        kept = _without(lines, name) if has_table else lines
        body = "".join(kept)
        gap = "" if not body else "\n" if body.endswith("\n") else "\n\n"
        merged = body + gap + section
    try:
        is_same = _others(tomllib.loads(merged), name) == _others(tables, name)
    except tomllib.TOMLDecodeError:
        is_same = False
    if not is_same:
        raise ValueError(f"`efficiencies.{name}` cannot be taken apart from the rest of the file")
    return merged


def _lines_of(text: str, name: str) -> tuple[int | None, int | None]:
    """The first and the last line of what an earlier calibration wrote."""
    begin = end = None
    for number, line in enumerate(text.splitlines()):
        if line.startswith(f"{_BEGIN} {name}:"):
            begin = number
        elif begin is not None and line.strip() == f"{_END} {name}":
            end = number
            break
    return begin, end


def _without(lines: Sequence[str], name: str) -> list[str]:
    """The lines but those of `[efficiencies.NAME]` and of the tables inside it; comments that
    stand right above the next table stay."""
    own = re.compile(
        rf"""\s*\[\s*["']?efficiencies["']?\s*\.\s*["']?{re.escape(name)}["']?\s*[].]"""
    )
    kept: list[str] = []
    held: list[str] = []
    inside = False
    for line in lines:
        if re.match(r"\s*\[", line):
            inside = bool(own.match(line))
            kept += [] if inside else held
            held = []
        if not inside:
            kept.append(line)
        elif not line.strip() or line.lstrip().startswith("#"):
            held.append(line)
        else:
            held = []
    return kept


def _others(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Everything but the table; `[efficiencies]` with nothing else in it is as good as none."""
    rest = {key: value for key, value in tables.items() if key != "efficiencies"}
    others = {key: row for key, row in tables.get("efficiencies", {}).items() if key != name}
    return rest | ({"efficiencies": others} if others else {})
