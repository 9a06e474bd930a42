"""One rank's data file, read back and hashed, and the folder that all ranks' files become.

No process here talks to another: what a rank wrote is in `part-RANK` beside its file, and one rank
waits for all of them. A sealed folder is a checkpoint (`record/checkpoints.py`).

The comparison is of what can be read back, which the page cache answers: it finds a torn or short
write and anything that happens later, not a disk that already lies. No torch.
"""

import ctypes
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, TypedDict

import msgspec
import xxhash

from paceline.record import checkpoints
from paceline.record.best import Best
from paceline.record.checkpoints import BatchChanges, FileRecord, Manifest
from paceline.record.lines import write_whole
from paceline.record.tensors import (
    TENSORS,
    Piece,
    TensorRecord,
    encode_tensors,
    join_tables,
)
from paceline.runtime.checkpoint._reason import plain_reason
from paceline.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One box of a tensor, or another value, as a data file holds it."""

    name: str
    dtype: str
    """As torch names it; empty for a value that is no tensor."""

    size: tuple[int, ...]
    offset: tuple[int, ...]
    """Where the box begins in the whole tensor."""

    shape: tuple[int, ...]
    head: bytes
    """Bytes before the values; all there is of a value that is no tensor."""

    tail: bytes
    num_bytes: int

    @property
    def length(self) -> int:
        """Bytes in the file."""
        return len(self.head) + self.num_bytes + len(self.tail)


Source = Callable[[int], memoryview]
"""Index of a record -> the bytes of its values, writable memory."""


class KnownFacts(TypedDict, total=False):
    """What a caller may say of a state, for its manifest (`record.checkpoints.Manifest`)."""

    layout: str
    mesh: Mapping[str, int]
    seed: int | None
    samples: int | None
    job_digest: str | None
    held_out_loss: float | None
    state_digest: str | None
    loss_scaler: Mapping[str, float] | None
    batches: BatchChanges
    best: Best | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPolicy:
    """Copies in another storage."""

    url: str
    keep: int
    compress: Literal["auto", "never", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """One save, as every rank's writer is told it."""

    folder: Path
    manifest: Manifest
    """As it will be, without its files."""

    attempt: str
    rank: int
    num_bytes: int
    """Disk that all ranks' files take together."""

    keep: Mapping[str, int | None]
    copy_to: CopyPolicy | None = None
    """Where the committed checkpoint is copied to."""

    @property
    def final(self) -> Path:
        return self.folder / checkpoints.checkpoint_name(self.manifest.step)

    @property
    def tmp(self) -> Path:
        return self.folder / f"{self.final.name}.{self.attempt}.tmp"


class WriteError(Exception):
    """This rank's part, or the whole, could not be written."""

    def __init__(self, reason: str, *, is_space: bool = False) -> None:
        self.reason = reason
        self.is_space = is_space
        super().__init__(reason)


class Abandoned(Exception):
    """The save is not wanted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartFile:
    """What a rank tells the one that seals."""

    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


@contextmanager
def telling(task: WriteTask) -> Iterator[None]:
    """What the system refuses becomes a `WriteError`, a full disk known as such."""
    try:
        yield
    except (WriteError, Abandoned):
        raise
    except Exception as error:  # whatever it is, the other ranks must hear of it
        reason = plain_reason(error)
        free = free_bytes(task.folder)
        # By now what was written may be gone again, and what filled the disk as well.
        is_full = free < max(task.num_bytes, 1 << 20) and isinstance(error, OSError)
        if is_full or "no space left" in reason:
            raise WriteError(_no_space(task, free), is_space=True) from error
        raise WriteError(reason) from error


def write_part(task: WriteTask, records: Sequence[Record], source: Source) -> bytes:
    """Write this rank's data file, synced, and compare it with what was to be written.

    Returns:
        What the rank that seals needs to know of it, for `publish_part`.

    Raises:
        WriteError: It could not be written, or reads back as something else.
    """
    with telling(task):
        task.tmp.mkdir(parents=True, exist_ok=True)
        _check_room(task)
        path = task.tmp / data_file(task.rank)
        with path.open("wb", buffering=_BUFFER_BYTES) as file:
            for index, record in enumerate(records):
                _write_record(file, record, source(index))
            file.flush()
            os.fsync(file.fileno())
        return _read_back(path, records, source)


def data_file(rank: int) -> str:
    """Name of the file of a rank, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def publish_part(task: WriteTask, part: bytes) -> None:
    """Let the rank that seals have this rank's part."""
    with telling(task):
        write_whole(task.tmp / f"part-{task.rank}", part)


def wait_for_parts(task: WriteTask, check_wanted: Callable[[], None]) -> None:
    """Return once every rank's part is there.

    Args:
        check_wanted: Called between two looks; raises when the save is abandoned.
    """
    missing = list(range(task.manifest.world_size))
    while True:
        missing = [rank for rank in missing if not (task.tmp / f"part-{rank}").exists()]
        if not missing:
            return
        check_wanted()
        time.sleep(_LOOK_S)


_LOOK_S = 0.005
"""Between two looks for the other ranks' parts. A guess: short beside an fsync."""


def seal(task: WriteTask, metadata: bytes) -> int:
    """Make the folder a checkpoint, and delete what the policy does not keep.

    Returns:
        Bytes of all data files together.

    Raises:
        WriteError: It could not be committed.
    """
    with telling(task):
        paths = [task.tmp / f"part-{rank}" for rank in range(task.manifest.world_size)]
        parts = [msgspec.json.decode(path.read_bytes(), type=_PartFile) for path in paths]
        write_whole(task.tmp / ".metadata", metadata)
        tensors = join_tables(part.tensors for part in parts)
        write_whole(task.tmp / TENSORS, encode_tensors(tensors))
        files = {name: record for part in parts for name, record in part.files.items()}
        for name in (".metadata", TENSORS):
            files[name] = checkpoints.hash_file(task.tmp / name)
        manifest = replace(task.manifest, files=files, created=checkpoints.utc_now())
        for path in paths:
            path.unlink()
        checkpoints.commit(task.tmp, task.final, manifest)
    # A disk that refuses here costs space, not the checkpoint that was just written.
    with suppress(OSError):  # tried again after the next save
        checkpoints.prune(task.folder, **task.keep)  # type: ignore[arg-type]
    return manifest.num_bytes


def remove_unfinished(task: WriteTask) -> None:
    """What a save that failed left behind."""
    shutil.rmtree(task.tmp, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write to the disk of a folder, or its nearest parent's."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _check_room(task: WriteTask) -> None:
    """Require room for all ranks' files; what other ranks have written by now counts as room."""
    written = 0
    for path in task.tmp.iterdir():
        with suppress(FileNotFoundError):  # another rank has just given its part its name
            written += path.stat().st_size
    free = free_bytes(task.folder)
    if free + written < task.num_bytes:
        raise WriteError(_no_space(task, free), is_space=True)


def _no_space(task: WriteTask, free: int) -> str:
    return (
        f"no space left on device: {task.folder}, {format_bytes(task.num_bytes)} needed, "
        f"{format_bytes(free)} free"
    )


_BUFFER_BYTES = 1 << 20
"""Small records are gathered to this much; larger ones go to the file as they are."""


def _write_record(file: BinaryIO, record: Record, values: memoryview) -> None:
    file.write(record.head)
    if record.num_bytes:
        file.write(values)
    file.write(record.tail)


def _read_back(path: Path, records: Sequence[Record], source: Source) -> bytes:
    size = path.stat().st_size
    if size != sum(record.length for record in records):
        raise WriteError(f"{path.name} has {size} bytes, not what was written")
    tables: list[dict[str, TensorRecord]] = []
    digest, start = xxhash.xxh3_128(), 0
    with _mapped(path, size) as content:
        for index, record in enumerate(records):
            with content[start : start + record.length] as found:
                if not _holds(found, record, source(index)):
                    raise WriteError(f"{record.name} in {path.name} reads back as something else")
                digest.update(found)
                hashed = xxhash.xxh3_128_hexdigest(found)
            piece = Piece(
                file=path.name,
                start=start,
                length=record.length,
                offset=record.offset,
                shape=record.shape,
                xxh3_128=hashed,
            )
            told = TensorRecord(size=record.size, dtype=record.dtype, pieces=(piece,))
            tables.append({record.name: told})
            start += record.length
    files = {path.name: FileRecord(size=size, xxh3_128=digest.hexdigest())}
    return msgspec.json.encode(_PartFile(files=files, tensors=join_tables(tables)))


def _holds(found: memoryview, record: Record, values: memoryview) -> bool:
    head, end = len(record.head), len(record.head) + record.num_bytes
    framed = bytes(found[:head]) == record.head and bytes(found[end:]) == record.tail
    return framed and _is_same(found[head:end], values)


_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _is_same(one: memoryview, other: memoryview) -> bool:
    """Python compares memory a byte at a time; the C library ten times as fast."""
    if one.nbytes != other.nbytes:
        return False
    if one.nbytes == 0:
        return True
    places = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (one, other)]
    return bool(_LIBC.memcmp(*places, one.nbytes) == 0)


@contextmanager
def _mapped(path: Path, size: int) -> Iterator[memoryview]:
    """What a file holds; private and writable, as ctypes gives an address of no other memory."""
    if size == 0:
        yield memoryview(b"")
        return
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as content,
        memoryview(content) as view,
    ):
        yield view
