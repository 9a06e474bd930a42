"""Files that are written whole or line by line: JSON lines outlive a full disk."""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

_T = TypeVar("_T")

_MEANWHILE_FULL = (errno.ENOSPC, errno.EDQUOT)


class LineFile:
    """Appends whole lines. What a full disk refuses is kept and written when there is room."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        """Args:
        path: The file; made by the first line.
        sync: Whether a line is on the disk itself, not only with the kernel, after `write`.
        """
        self._path = path
        self._sync = sync
        self._fd: int | None = None
        self._unwritten = b""

    def write(self, line: bytes) -> None:
        """Append a line, without its newline."""
        self._unwritten += line + b"\n"
        self._flush()

    def close(self) -> None:
        """Try once more what is unwritten, and close; another write opens the file again."""
        self._flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _flush(self) -> None:
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
                size = os.fstat(self._fd).st_size
                if size and os.pread(self._fd, 1, size - 1) != b"\n":
                    # A crash tore the last line: what follows begins on a line of its own.
                    self._unwritten = b"\n" + self._unwritten
            while self._unwritten:
                written = os.write(self._fd, self._unwritten)
                self._unwritten = self._unwritten[written:]
            if self._sync:
                os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _MEANWHILE_FULL:
                raise


class JsonLines(Generic[_T]):
    """Appends values of one kind as lines of JSON."""

    def __init__(self, path: Path, *, sync: bool = False) -> None:
        self._file = LineFile(path, sync=sync)
        self.close = self._file.close

    def write(self, value: _T) -> None:
        self._file.write(msgspec.json.encode(value))


def decoded(content: bytes, decode: Callable[[bytes], _T]) -> Iterator[_T]:
    """The values of the lines; one that is torn or of another kind is left out."""
    for line in content.split(b"\n"):
        if line.strip():
            with contextlib.suppress(msgspec.DecodeError):
                yield decode(line)


def read_tail(path: Path, num_bytes: int = 64 << 10) -> bytes:
    """The end of a file: of most kinds, some hundred lines."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        return file.read()


def write_json(path: Path, value: object) -> None:
    """A value as a file of JSON for people, whole or not at all."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """The value of a file; None where there is none that this version can read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in place, whole or not at all, and on the disk itself."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def write_facts(path: Path, value: object) -> None:
    """What a process found out, as one JSON file. Numbers that are not finite stay what they are,
    as Python's own JSON writes them."""
    write_whole(path, json.dumps(msgspec.to_builtins(value)).encode())


def read_facts(path: Path, kind: type[_T]) -> _T:
    """A value of this kind, as `write_facts` wrote it."""
    return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), type=kind)
