"""Hashes of source files, kept beside what is prepared: a file of the same size and time of change
is not read again."""

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from paceline.job.sources import import_fsspec
from paceline.prepare.rows import unreadable

_KEPT = "contents.json"
_YOUNG_S = 2.0
"""A file may change again within the clock's grain, with the same time: git calls it racy."""


def contents_of(files: Sequence[str], cache: Path) -> dict[str, str]:
    """Each file -> hash of its contents; of a URL what its storage keeps (ETag, time, size).

    Megatron's index beside a `.bin` file is among them.

    Raises:
        JobError: D002, a file cannot be read.
    """
    kept = _read(cache / _KEPT)
    indexes = (str(Path(file).with_suffix(".idx")) for file in files if file.endswith(".bin"))
    found: dict[str, str] = {}
    is_new = False
    for file in (*files, *filter(os.path.isfile, indexes)):
        try:
            if "://" in file:
                storage, path = import_fsspec(file).core.url_to_fs(file)
                found[file] = xxhash.xxh3_128_hexdigest(str(storage.ukey(path)).encode())
                continue
            status = os.stat(file)
            known = kept.get(file)
            if known is None or known[:2] != (status.st_size, status.st_mtime_ns):
                with open(file, "rb") as stream:
                    content = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
                known = status.st_size, status.st_mtime_ns, content
                if time.time() - status.st_mtime > _YOUNG_S:
                    kept[file], is_new = known, True
            found[file] = known[2]
        except OSError as error:
            raise unreadable(file, error) from None
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
        with suppress(OSError):
            unfinished.unlink()
