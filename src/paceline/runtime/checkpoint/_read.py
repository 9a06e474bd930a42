"""Read a checkpoint's records into the memory that they are for, each hashed as it is read.

A record is a row of a data file: a frame, the values, the rest of the frame (`_frames.py`). Where
the frame is the one that this torch writes, values are read straight to where they go; any other
is given to `torch.load`. A rank that needs a part of a record reads those rows alone.

Leaves out: agreement between ranks (`restore.py`).
"""

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from paceline.record.checkpoints import METADATA, Manifest
from paceline.record.tensors import TENSORS, Place, TensorRecord, hashed_places
from paceline.runtime.checkpoint._frames import frame_of
from paceline.runtime.checkpoint._save_plan import Part
from paceline.runtime.checkpoint.pickles import decode_table
from paceline.runtime.state import Box

_CHUNK_BYTES = 512 << 10
"""Read at once, then hashed while a core's cache has it. 4 GB in 0.43 s of a core at 512 KiB,
0.5 s at 4 MiB, 0.7 s at 128 KiB (measured, AMD EPYC, page cache)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a record's values, and where it goes."""

    box: tuple[slice, ...]
    into: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One record, and what this rank needs of it."""

    file: str
    start: int
    length: int

    name: str = ""
    """Name of the tensor or other value; empty where the bytes are only hashed."""

    dtype: torch.dtype | None = None
    """None for a value that is no tensor."""

    shape: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()

    @property
    def place(self) -> Place:
        """What tells it from every other."""
        return self.file, self.start, self.length

    @property
    def rows(self) -> tuple[int, int]:
        """The rows of the values that are needed: first, and the one after the last."""
        if not self.shape:
            return 0, 1
        boxes = [copy.box[0] for copy in self.copies]
        return min(box.start for box in boxes), max(box.stop for box in boxes)

    @property
    def is_whole(self) -> bool:
        """Whether every byte of the record is read."""
        return self.dtype is None or not self.shape or self.rows == (0, self.shape[0])


@dataclass(slots=True)
class Found:
    """What came of reading."""

    values: dict[str, Any] = field(default_factory=dict)
    """Those that are no tensors, by name."""

    damaged: set[str] = field(default_factory=set)
    """Files with bytes that are not those that were written, or that cannot be read."""


@dataclass(frozen=True, slots=True)
class Tables:
    """What a checkpoint holds and where, without its values."""

    metadata: Metadata
    hashes: Mapping[Place, str]
    """What every byte is compared with; empty where nothing is."""

    @property
    def saved(self) -> Mapping[str, Any]:
        """Size and type by name."""
        saved: Mapping[str, Any] = self.metadata.state_dict_metadata
        return saved


def open_tables(path: Path, manifest: Manifest | None) -> Tables:
    """Read the tables of a checkpoint, and trust no byte of them that is not the manifest's.

    torch's is a pickle, of which only torch's own classes are made: no code in it runs. Values that
    are no tensors (the extra state of modules, states of streams) are pickles of any kind: whoever
    can write a manifest can have code run here.

    Raises:
        ValueError: A table is not what was written.
        CheckpointError: `C015`, a table names code.
    """
    encoded = (path / METADATA).read_bytes()
    if manifest is None:
        return Tables(decode_table(encoded), {})
    _check_table(METADATA, encoded, manifest)
    table: dict[str, TensorRecord] = {}
    if TENSORS in manifest.files:
        listed = (path / TENSORS).read_bytes()
        _check_table(TENSORS, listed, manifest)
        table = msgspec.json.decode(listed, type=dict[str, TensorRecord])
    files = {
        name: (record.size, record.xxh3_128)
        for name, record in manifest.files.items()
        if name not in (METADATA, TENSORS)
    }
    return Tables(decode_table(encoded), hashed_places(table, files))


def _check_table(name: str, content: bytes, manifest: Manifest) -> None:
    if xxhash.xxh3_128_hexdigest(content) != manifest.files[name].xxh3_128:
        raise ValueError(f"{name} is not what was written")


def readings_of(target: Mapping[str, Part | Any], metadata: Metadata) -> list[Reading]:
    """Every record that this rank needs something of.

    Raises:
        ValueError: The records do not cover what is needed.
    """
    places: dict[str, list[tuple[Any, Any]]] = {}
    for index, place in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((index, place))
    readings = []
    for name, value in target.items():
        facts = metadata.state_dict_metadata[name]
        if not isinstance(facts, TensorStorageMetadata):
            for _, place in places[name]:
                readings.append(_reading(place, name))
            continue
        shapes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in facts.chunks}
        left = sum(box.tensor.numel() for box in value.boxes)
        for index, place in places[name]:
            offset = tuple(index.offset)
            copies = tuple(_copies(offset, shapes[offset], value.boxes))
            left -= sum(copy.into.numel() for copy in copies)
            if copies:
                dtype, shape = facts.properties.dtype, shapes[offset]
                readings.append(_reading(place, name, dtype, shape, copies))
        if left != 0:
            raise ValueError(f"{name}: {left} of its elements are in no file")
    return readings


def read(
    folder: Path,
    readings: Iterable[Reading],
    hashes: Mapping[Place, str],
    *,
    threads: int,
) -> Found:
    """Read what this rank needs, and compare what it reads whole with its hash.

    Args:
        readings: Also those without a name, which are only hashed.
        hashes: xxh3-128 by file, start and length; what is not in it is not compared.
    """
    found = Found()
    ordered = sorted(readings, key=lambda each: each.place)
    for file, group in groupby(ordered, key=lambda each: each.file):
        here = list(group)
        try:
            # The threads end before the file is closed.
            with _opened(folder / file) as descriptor, ThreadPoolExecutor(threads) as pool:
                contents = pool.map(lambda each: _content(descriptor, each, hashes), here)
                for reading, content in zip(here, contents, strict=True):
                    if reading.name and reading.dtype is None:
                        value = torch.load(io.BytesIO(content), weights_only=False)
                        found.values[reading.name] = value
        except (OSError, EOFError, _Damaged):
            found.damaged.add(file)
    return found


class _Damaged(Exception):
    """The bytes are not those that were written."""


def _reading(
    place: Any,
    name: str,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
    copies: tuple[Copy, ...] = (),
) -> Reading:
    return Reading(
        file=place.relative_path,
        start=place.offset,
        length=place.length,
        name=name,
        dtype=dtype,
        shape=shape,
        copies=copies,
    )


def _copies(
    offset: tuple[int, ...], shape: tuple[int, ...], boxes: Sequence[Box]
) -> Iterator[Copy]:
    """What a record has of each box of this rank."""
    for box in boxes:
        edges = [
            (max(p, b), min(p + n, b + m))
            for p, n, b, m in zip(offset, shape, box.offset, box.tensor.shape, strict=True)
        ]
        if any(low >= high for low, high in edges):
            continue
        there = tuple(
            slice(low - p, high - p) for (low, high), p in zip(edges, offset, strict=True)
        )
        here = tuple(
            slice(low - b, high - b) for (low, high), b in zip(edges, box.offset, strict=True)
        )
        yield Copy(there, box.tensor[here])


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int, reading: Reading, hashes: Mapping[Place, str]) -> bytes:
    """Read one record; the bytes of a value that is no tensor.

    Raises:
        _Damaged: They are not those that were written.
    """
    expected = hashes.get(reading.place)
    if not reading.name:
        _check(_hash_range(descriptor, reading), expected)
        return b""
    if reading.dtype is not None and _read_framed(descriptor, reading, reading.dtype, expected):
        return b""
    digest, content = xxhash.xxh3_128(), bytearray(reading.length)
    _fill(descriptor, reading.start, memoryview(content), digest)
    _check(digest, expected)
    if reading.dtype is not None:  # another version of torch has framed it
        values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        for copy in reading.copies:
            copy.into.copy_(values[copy.box])
    return bytes(content) if reading.dtype is None else b""


def _check(digest: Any, expected: str | None) -> None:
    if expected not in (None, digest.hexdigest()):
        raise _Damaged


def _hash_range(descriptor: int, reading: Reading) -> Any:
    digest, room, at = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES)), 0
    while at < reading.length:
        count = min(_CHUNK_BYTES, reading.length - at)
        _fill(descriptor, reading.start + at, room[:count], digest)
        at += count
    return digest


def _read_framed(
    descriptor: int, reading: Reading, dtype: torch.dtype, expected: str | None
) -> bool:
    """Read the rows that are needed to where they go; False where the frame is another."""
    head, tail = frame_of(reading.shape, dtype)
    row_bytes = dtype.itemsize * torch.Size(reading.shape[1:]).numel()
    num_bytes = row_bytes * (reading.shape[0] if reading.shape else 1)
    if reading.length != len(head) + num_bytes + len(tail):
        return False
    digest, frame = xxhash.xxh3_128(), memoryview(bytearray(len(head)))
    _fill(descriptor, reading.start, frame, digest)
    if frame != head:
        return False
    first, end = reading.rows
    shape = (end - first, *reading.shape[1:]) if reading.shape else ()
    into = _direct(reading, shape)
    room = torch.empty(shape, dtype=dtype) if into is None else into
    values = reading.start + len(head)
    _fill(descriptor, values + first * row_bytes, _bytes_of(room), digest)
    if reading.is_whole:
        _fill(descriptor, values + num_bytes, memoryview(bytearray(len(tail))), digest)
        _check(digest, expected)
    if into is None:
        for copy in reading.copies:
            copy.into.copy_(room[_shifted(copy.box, first)])
    return True


def _direct(reading: Reading, shape: tuple[int, ...]) -> Tensor | None:
    """The live memory where the rows can be read to as they are; None where they go by a copy."""
    if len(reading.copies) != 1:
        return None
    into = reading.copies[0].into
    is_plain = into.device.type == "cpu" and into.is_contiguous() and into.dtype == reading.dtype
    return into if is_plain and tuple(into.shape) == shape else None


def _shifted(box: tuple[slice, ...], first: int) -> tuple[slice, ...]:
    return (slice(box[0].start - first, box[0].stop - first), *box[1:]) if box else ()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _fill(descriptor: int, start: int, memory: memoryview, digest: Any) -> None:
    """Read what fills the memory, and hash it on the way.

    Raises:
        EOFError: The file ends before.
    """
    at = 0
    while at < len(memory):
        count = os.preadv(descriptor, [memory[at : at + _CHUNK_BYTES]], start + at)
        if count == 0:
            raise EOFError("the file is cut off")
        digest.update(memory[at : at + count])
        at += count
