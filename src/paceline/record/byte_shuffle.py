"""Lossless compression of tensors: the bytes of a number apart by their place, then zstandard.

Sign and exponent of trained weights vary little and compress; most of the mantissa does not. So the
first bytes of all numbers of a chunk stand together, then the second, and so on.

The form: 8 bytes of magic, then chunks, each `width, raw bytes, stored bytes` (`<BII`) and the
stored bytes. Needs zstandard, an extra.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from paceline.record.tensors import TensorTable

MAGIC = b"PLPLANE1"
LEVEL = 1
"""zstandard's fastest but one: higher levels gain nothing on mantissas. Measured by
benchmarks/checkpoint_compression.py."""

_HEADER = struct.Struct("<BII")
_CHUNK_BYTES = 4 << 20
_SMALL_BYTES = 16 << 10

_WIDTHS = {
    "float64": 8,
    "int64": 8,
    "complex64": 4,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
}
"""Bytes of a number; of any other type 1, which takes nothing apart."""

Span = tuple[int, int]
"""Bytes, and of how many each number in them is."""


def spans_of(file: str, size: int, table: TensorTable) -> list[Span]:
    """A data file as spans of one width each, in its order."""
    pieces = sorted(
        (piece.start, piece.length, _WIDTHS.get(record.dtype, 1))
        for record in table.values()
        for piece in record.pieces
        if piece.file == file
    )
    spans = [(length, width) for _, length, width in pieces]
    rest = size - sum(length for length, _ in spans)
    return [*spans, (rest, 1)] if rest > 0 else spans


def compressed(file: BinaryIO, spans: Sequence[Span]) -> Iterator[bytes]:
    """The whole of a file, compressed, piece by piece."""
    compressor = _zstandard().ZstdCompressor(level=LEVEL)
    yield MAGIC
    for length, width in _joined(spans):
        left = length
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise OSError("the file is shorter than its table says")
            stored = compressor.compress(_apart(chunk, width))
            yield _HEADER.pack(width, len(chunk), len(stored)) + stored
            left -= len(chunk)


def decompressed(file: BinaryIO) -> Iterator[bytes]:
    """What was compressed, piece by piece.

    Raises:
        OSError: It is cut off, or not of this form.
    """
    zstandard = _zstandard()
    decompressor = zstandard.ZstdDecompressor()
    if file.read(len(MAGIC)) != MAGIC:
        raise OSError("it is not of the compressed form")
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise OSError("it is cut off")
        width, raw, stored = _HEADER.unpack(header)
        if raw > _CHUNK_BYTES or not 1 <= width <= 8:
            raise OSError("it is not of the compressed form")
        try:
            chunk = decompressor.decompress(file.read(stored), max_output_size=raw)
        except zstandard.ZstdError as error:
            raise OSError(f"it does not decompress: {error}") from None
        if len(chunk) != raw:
            raise OSError("it does not decompress to its length")
        yield _together(chunk, width)


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Small neighbours as one span, whatever they are: none is worth a chunk of its own.

    A larger one begins its own chunk, so that its numbers, which stand at a multiple of 64 in it,
    come apart at their bytes.
    """
    small = 0
    for length, width in spans:
        if length < _SMALL_BYTES:
            small += length
            continue
        if small:
            yield small, 1
            small = 0
        yield length, width
    if small:
        yield small, 1


def _apart(chunk: bytes, width: int) -> bytes:
    if width == 1:
        return chunk
    import numpy as np

    whole = len(chunk) // width * width
    planes = np.frombuffer(chunk, np.uint8, count=whole).reshape(-1, width).T
    return planes.tobytes() + chunk[whole:]


def _together(chunk: bytes, width: int) -> bytes:
    if width == 1:
        return chunk
    import numpy as np

    whole = len(chunk) // width * width
    planes = np.frombuffer(chunk, np.uint8, count=whole).reshape(width, -1).T
    return planes.tobytes() + chunk[whole:]


def _zstandard() -> Any:
    import zstandard

    return zstandard
