"""Hashes of source files, kept beside what is prepared: a file of the same size and time of change
is not read again."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.prepare.rows import content_of, unreadable

_KEPT = "contents.json"
_YOUNG_S = 2.0
"""A file may change again within the clock's grain, with the same time: git calls it racy."""


def contents_of(files: Sequence[str], cache: Path) -> dict[str, str]:
    """Each file -> hash of its contents; of a URL what its storage keeps instead.

    Megatron's index beside a `.bin` file is among them.

    Raises:
        JobError: D002, a file cannot be read.
    """
    kept = _read(cache / _KEPT)
    indexes = (str(Path(file).with_suffix(".idx")) for file in files if file.endswith(".bin"))
    files = [*files, *(index for index in indexes if os.path.isfile(index))]
    found: dict[str, str] = {}
    is_new = False
    for file in files:
        if "://" in file:
            found[file] = content_of(file)
            continue
        try:
            status = os.stat(file)
        except OSError as error:
            raise unreadable(file, error) from None
        known = kept.get(file)
        if known is not None and known[:2] == (status.st_size, status.st_mtime_ns):
            found[file] = known[2]
            continue
        found[file] = content_of(file)
        if time.time() - status.st_mtime > _YOUNG_S:
            kept[file] = (status.st_size, status.st_mtime_ns, found[file])
            is_new = True
    if is_new:
        _write(cache / _KEPT, kept)
    return found


_Known = dict[str, tuple[int, int, str]]
"""File -> size, time of change in ns, hash."""


def _read(path: Path) -> _Known:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Known)
    except (OSError, msgspec.MsgspecError):  # not there, or cut off: everything is read again
        return {}


def _write(path: Path, kept: _Known) -> None:
    """Where the folder cannot be written, the files are read again next time."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(kept))
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
