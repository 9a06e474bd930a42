"""Where each part of each tensor lies in a checkpoint's files, with its hash. No torch.

`tensors.json` beside the data files, one of the files that the manifest vouches for. It says what a
checkpoint holds without reading it, and which tensor a damaged byte belongs to: the parts of a file
follow each other without a gap, so every byte of it is some tensor's.

Leaves out: the values (`runtime/checkpoint/`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

TENSORS = "tensors.json"

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of a tensor, as a file holds it: a record of `torch.save`, its frame included."""

    file: str
    start: int
    """Bytes before it in the file."""

    length: int
    offset: tuple[int, ...]
    """Where the box begins in the whole tensor."""

    shape: tuple[int, ...]
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor, or another value, of the state."""

    size: tuple[int, ...]
    dtype: str
    """As torch names it, `bfloat16`; empty for a value that is no tensor."""

    pieces: tuple[Piece, ...]
    """Together the whole of it, each element once."""


Place = tuple[str, int, int]
"""File, bytes before, and bytes: where something lies in a checkpoint."""

TensorTable = Mapping[str, TensorRecord]
"""By name, `model/blocks.0.ffn.up.weight`."""


def read_tensors(path: Path) -> TensorTable | None:
    """The table of a checkpoint folder; None for one of form 1, which has none.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It is damaged, which `verify_checkpoint` says first.
    """
    try:
        encoded = (path / TENSORS).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(encoded, type=dict[str, TensorRecord])


def encode_tensors(table: TensorTable) -> bytes:
    """The table as it is written; the same table gives the same bytes."""
    return msgspec.json.encode(dict(sorted(table.items())))


def join_tables(tables: Iterable[TensorTable]) -> dict[str, TensorRecord]:
    """What several ranks wrote, as one table."""
    joined: dict[str, TensorRecord] = {}
    for table in tables:
        for name, record in table.items():
            old = joined.get(name)
            pieces = record.pieces if old is None else (*old.pieces, *record.pieces)
            joined[name] = TensorRecord(size=record.size, dtype=record.dtype, pieces=pieces)
    return joined


def hashed_places(table: TensorTable, files: Mapping[str, tuple[int, str]]) -> dict[Place, str]:
    """What to compare so that every byte of the files is compared: hashes by place.

    The parts of the tensors, where they cover a file without a gap; else the whole file.

    Args:
        table: Empty for a checkpoint of form 1.
        files: Size and xxh3-128 of each data file, by name.

    >>> hashed_places({}, {"a": (7, "00")})
    {('a', 0, 7): '00'}
    """
    parts: dict[str, list[Piece]] = {name: [] for name in files}
    for record in table.values():
        for piece in record.pieces:
            parts.setdefault(piece.file, []).append(piece)
    places: dict[Place, str] = {}
    for name, (size, whole) in files.items():
        pieces, end = sorted(parts[name], key=lambda piece: piece.start), 0
        for piece in pieces:
            end = end + piece.length if piece.start == end else -1
        if end == size:
            places |= {(name, each.start, each.length): each.xxh3_128 for each in pieces}
        else:
            places[name, 0, size] = whole
    return places


def damaged_tensors(path: Path, file: str, table: TensorTable) -> list[str]:
    """Names of the tensors whose bytes in a file are not those that were written, in its order.

    What was cut off counts as damaged. Reads the file once.
    """
    pieces = sorted(
        ((piece.start, name, piece) for name, record in table.items() for piece in record.pieces),
        key=lambda each: each[0],
    )
    mine = [(name, piece) for _, name, piece in pieces if piece.file == file]
    with (path / file).open("rb") as opened:
        found = [(name, _hash_range(opened, each), each.xxh3_128) for name, each in mine]
    return list(dict.fromkeys(name for name, is_now, was in found if is_now != was))


def _hash_range(opened: BinaryIO, piece: Piece) -> str:
    digest, left = xxhash.xxh3_128(), piece.length
    opened.seek(piece.start)
    while left and (chunk := opened.read(min(left, _CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()
