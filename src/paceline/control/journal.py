"""The controller's write-ahead journal: what happened to it, on disk before it acts on that.

`decide` is deterministic, so the state at any moment follows from what was fed to it. Each record
is one entry with its own checksum. The file begins with a snapshot of the state, and begins anew
with a later one when it has grown. A controller that takes over replays the rest.

    file    = magic record*                      the first record is the snapshot
    record  = length:u32 crc(payload):u32 crc(of these 8 bytes):u32 payload

Leaves out: what the entries mean (`failover.py`).
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import JobError
from paceline.record.checkpoints import sync_path

MAGIC = b"PLJRNL1\n"

ROTATE_BYTES = 4 << 20
"""Beyond, the file begins anew with a snapshot. A guess: replaying this much takes a second."""

_HEAD = struct.Struct("<III")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Journal:
    """The writer. On a full disk it gives up the file rather than the run; see `is_lost`."""

    def __init__(self, path: Path) -> None:
        self.is_lost = False
        """Whether there is no journal now, as the disk has no room for it."""

        self._path = path
        self._fd: int | None = None
        self._num_bytes = 0

    @property
    def is_grown(self) -> bool:
        """Whether it is time to begin anew."""
        return self._num_bytes > ROTATE_BYTES

    def begin(self, snapshot: bytes) -> None:
        """Replace what there is by a journal that begins with this, whole or not at all."""
        partial = self._path.with_name(self._path.name + ".tmp")
        try:
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            try:
                content = MAGIC + _record(snapshot)
                _write_all(fd, content)
                os.fsync(fd)
                partial.rename(self._path)
            except BaseException:
                os.close(fd)
                raise
            sync_path(self._path.parent)
        except OSError as error:
            self._give_up(error)
            return
        self.close()
        self._fd, self._num_bytes, self.is_lost = fd, len(content), False

    def go_on(self) -> None:
        """Append to the file that there is, which `read_journal` has read; a torn end is cut."""
        *_, end = _scan(self._path)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.ftruncate(fd, end[1])
        self._fd, self._num_bytes = fd, end[1]

    def write(self, entry: bytes, *, sync: bool) -> None:
        """Append an entry.

        Args:
            sync: Whether it must be on the disk itself, with all before it, when this returns.
        """
        if self._fd is None:
            return
        record = _record(entry)
        try:
            _write_all(self._fd, record)
            if sync:
                os.fdatasync(self._fd)
        except OSError as error:
            self._give_up(error)
            return
        self._num_bytes += len(record)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def end(self) -> None:
        """The run is over: there is nothing to take over."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        """A journal with a gap would be replayed to a state that never was."""
        if error.errno not in _NO_ROOM:
            raise error
        self.end()
        self._path.with_name(self._path.name + ".tmp").unlink(missing_ok=True)
        self.is_lost = True


def read_journal(path: Path) -> list[bytes]:
    """The snapshot and the entries after it. A torn end is left out; empty without a file.

    Raises:
        JobError: A record that others follow is damaged, or the file is no journal.
    """
    if not path.exists():
        return []
    return [payload for payload, _ in _scan(path) if payload is not None]


def _scan(path: Path) -> Iterator[tuple[bytes | None, int]]:
    """Each payload with the offset behind it; at last None with where whole records end."""
    content = path.read_bytes()
    if not content.startswith(MAGIC):
        raise _damaged(path, 0)
    at = len(MAGIC)
    while len(content) - at >= _HEAD.size:
        length, crc, head_crc = _HEAD.unpack_from(content, at)
        begin = at + _HEAD.size
        payload = content[begin : begin + length]
        if zlib.crc32(content[at : at + 8]) != head_crc:
            # After a power failure the end may be zeros that were never written.
            if content[at:].strip(b"\0"):
                raise _damaged(path, at)
            break
        if len(payload) < length:
            break
        if zlib.crc32(payload) != crc:
            if content[begin + length :].strip(b"\0"):
                raise _damaged(path, at)
            break
        at = begin + length
        yield payload, at
    yield None, at


def _record(payload: bytes) -> bytes:
    head = struct.pack("<II", len(payload), zlib.crc32(payload))
    return head + struct.pack("<I", zlib.crc32(head)) + payload


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _damaged(path: Path, at: int) -> JobError:
    return JobError.of(
        code="R042",
        what=f"the controller's journal is damaged at byte {at}",
        where=str(path),
        fix="wait until the run's workers have stopped (recovery.lease and recovery.grace), "
        "delete the file, and resume from the newest checkpoint",
    )
