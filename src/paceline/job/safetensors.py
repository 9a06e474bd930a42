"""Which tensors a safetensors file holds, and where: its header, read without the library.

The form: 8 bytes with the header's length, little-endian; the header, JSON; the tensors' bytes, row
after row. Source: https://github.com/huggingface/safetensors#format.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from paceline.errors import JobError

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4}
BYTES |= {"I16": 2, "I8": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1}
"""Bytes of one value, by the name of its type in a header."""

_MOST_HEADER_BYTES = 100_000_000
"""As in the library, which refuses longer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor in a file."""

    name: str
    path: Path
    dtype: str
    """As the header has it: `BF16`."""

    shape: tuple[int, ...]
    start: int
    """Byte of the file where its values begin."""


def stored_tensors(paths: Sequence[Path], *, where: str) -> dict[str, StoredTensor]:
    """Every tensor of some files by name.

    Args:
        where: Their place in the job, for messages.

    Raises:
        JobError: `M012`, a file is damaged, or two files have a tensor of the same name; `C012`, a
            tensor is of a type that is not read.
    """
    found: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            tensors = _read_header(path)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise _damaged(path, reason or type(error).__name__, where) from None
        for each in tensors:
            if each.name in found:
                first = found[each.name].path.name
                raise _damaged(path, f"{each.name} is in {first} as well", where)
            found[each.name] = each
    return found


def _read_header(path: Path) -> list[StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < 8:
            raise ValueError(f"it has {size} bytes, too few for a header")
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(_MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"its header of {length} bytes does not fit its {size} bytes")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("its header is JSON, but no object of names and tensors")
    data = 8 + length
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _read_entry(name, entry)
        if dtype not in BYTES:
            raise JobError.of(
                code="C012",
                what=f"layout not read: {name} is of type {dtype}",
                where=str(path),
                fix=f"save it as one of {', '.join(BYTES)}",
            )
        if end - begin != prod(shape) * BYTES[dtype]:
            raise ValueError(f"{name} has {end - begin} bytes, which its shape {shape} does not")
        if data + end > size:
            raise ValueError(
                f"it ends after {size} bytes, and {name} lies up to {data + end}: "
                "the download was cut off"
            )
        start = data + begin
        tensors.append(StoredTensor(name=name, path=path, dtype=dtype, shape=shape, start=start))
    reached = data
    for each in sorted(tensors, key=lambda each: (each.start, bytes_of(each))):
        if each.start != reached:
            raise ValueError(
                f"{each.name} begins at byte {each.start}, the one before ends at {reached}"
            )
        reached += bytes_of(each)
    if reached != size:
        raise ValueError(f"it has {size} bytes, and its tensors end at {reached}")
    return tensors


def _read_entry(name: str, entry: object) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's type, shape, and first and last byte after the header."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            if all(isinstance(each, int) and each >= 0 for each in shape) and 0 <= begin <= end:
                return dtype, tuple(shape), begin, end
    raise ValueError(
        f"its header gives {name} as {json.dumps(entry)[:80]}, and not as dtype, shape and "
        "data_offsets, a text and lists of whole numbers from 0 on"
    )


def bytes_of(each: StoredTensor) -> int:
    """Bytes of a tensor's values."""
    return prod(each.shape) * BYTES[each.dtype]


def place_in(where: str, folder: Path) -> str:
    """A place and the folder that it means; the place alone where it is there."""
    return where if where.startswith(str(folder)) else f"{where}: {folder}"


def _damaged(path: Path, reason: str, where: str) -> JobError:
    return JobError.of(
        code="M012",
        what=f"{path.name} is not a whole safetensors file: {reason}",
        where=place_in(where, path.parent),
        fix="download the file again, or use an earlier checkpoint",
    )
