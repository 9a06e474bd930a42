"""Rows of a file, one at a time: lines of jsonl, items of a json array, rows of csv, parquet and
arrow files, or a whole text. Compressed files (gz, zst) and URLs of fsspec are streamed.

What cannot be read as a row comes as a `Broken` one, with its place and the reason.
"""

import codecs
import contextlib
import csv
import gzip
import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import msgspec
import xxhash

from paceline.errors import JobError
from paceline.prepare.tables import arrow_rows, parquet_rows
from paceline.spec.corpus import holds_rows
from paceline.spec.sources import import_fsspec

PIECE = 1 << 20
"""Characters of a text that are tokenized at once: a tokenizer's time and memory for one piece grow
with its length. A longer text is cut after a line's end (a guess at where tokens end too)."""

_MOST_OF_A_FIELD = 1 << 30
"""Characters in one field of a csv file; Python's own limit is 131,072."""

_START = 8192
"""Bytes of a file of another name that are looked at."""


class Row(NamedTuple):
    """One row of a file."""

    number: int
    """Its line, or its place counted from 1."""

    value: Any
    """Columns by name, or the text of a file."""

    is_first: bool = True
    is_last: bool = True
    """Whether it is the first and the last piece of a text that is read in pieces."""

    @property
    def is_whole(self) -> bool:
        """Whether it is no piece."""
        return self.is_first and self.is_last


class Broken(NamedTuple):
    """A row that cannot be read."""

    number: int
    reason: str


@contextmanager
def open_source(file: str) -> Iterator[IO[bytes]]:
    """A file or a URL for reading, decompressed by its name.

    Raises:
        JobError: D002, it cannot be read; R010, a package is missing.
    """
    try:
        if "://" in file:
            stream: IO[bytes] = import_fsspec(file).open(file, "rb").open()
        else:
            stream = open(file, "rb")  # noqa: SIM115  # closed below
    except OSError as error:
        raise unreadable(file, error) from None
    with stream:
        if file.endswith(".gz"):
            yield gzip.GzipFile(fileobj=stream)  # type: ignore[misc]
        elif file.endswith(".zst"):
            yield _unpacked_zst(file, stream)
        else:
            yield stream


def unreadable(file: str, error: Exception) -> JobError:
    """D002 for a source file."""
    reason = getattr(error, "strerror", None) or error
    return JobError.of(
        code="D002",
        what=f"{file} cannot be read: {reason}",
        where=file,
        fix="make it readable, or leave it out of the sources",
    )


def _unpacked_zst(file: str, stream: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise JobError.of(
            code="R010",
            what=f"{file} is compressed with zstandard, which is not installed",
            where=file,
            fix='pip install "paceline[data]"',
        ) from None
    reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
    return io.BufferedReader(reader)


def form_of(file: str) -> str:
    """How a file is read: `jsonl`, `json`, `csv`, `tsv`, `parquet`, `arrow`, `bin` or `text`."""
    suffixes = PurePosixPath(file.lower()).suffixes
    if suffixes and suffixes[-1] in (".gz", ".zst"):
        suffixes.pop()
    suffix = suffixes[-1][1:] if suffixes else ""
    named = {"ndjson": "jsonl", "feather": "arrow"}.get(suffix, suffix)
    if named in ("jsonl", "csv", "tsv", "parquet", "arrow", "bin"):
        return named
    with open_source(file) as stream:
        start = _read_start(file, stream)
    if holds_rows("", start):
        return "json" if start.lstrip().startswith(b"[") else "jsonl"
    return "text"


def _read_start(file: str, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_START)
    except (OSError, EOFError) as error:  # a damaged archive
        raise unreadable(file, error) from None


def read_rows(file: str, form: str) -> Iterator[Row | Broken]:
    """All rows of a file, in order.

    Raises:
        JobError: D002, the file cannot be read at all.
    """
    with open_source(file) as stream:
        try:
            yield from _READERS[form](stream)
        except (OSError, EOFError, msgspec.DecodeError, csv.Error) as error:
            raise unreadable(file, error) from None


def decode_line(line: bytes) -> Any:
    """The columns in a line of jsonl.

    Raises:
        ValueError: It holds something else.
    """
    value = msgspec.json.decode(line)
    if not isinstance(value, dict):
        raise ValueError(f"the line holds {type(value).__name__}, not columns in {{}}")
    return value


def _jsonl(stream: IO[bytes]) -> Iterator[Row | Broken]:
    """Lines as bytes: whoever tokenizes decodes them, beside others."""
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.isspace():
            yield Row(number, line)


def _json(stream: IO[bytes]) -> Iterator[Row | Broken]:
    rows = msgspec.json.decode(stream.read().removeprefix(codecs.BOM_UTF8))
    for number, value in enumerate(rows, 1):
        if isinstance(value, dict):
            yield Row(number, value)
        else:
            yield Broken(number, f"the row is {type(value).__name__}, not columns in {{}}")


def _table(stream: IO[bytes], delimiter: str) -> Iterator[Row | Broken]:
    csv.field_size_limit(_MOST_OF_A_FIELD)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.DictReader(text, delimiter=delimiter, strict=True)
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Broken(rows.line_num, str(error))
            continue
        if None in values or None in values.values():
            yield Broken(rows.line_num, f"it has not the {len(rows.fieldnames or ())} columns")
        else:
            yield Row(rows.line_num, values)


def _text(stream: IO[bytes]) -> Iterator[Row | Broken]:
    try:
        text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Broken(1, f"byte {error.start} is not UTF-8")
        return
    if "\0" in text[:_START]:
        yield Broken(1, "it holds zero bytes, which text does not")
        return
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1
        end = end if end > start else start + PIECE
        yield Row(1, text[start:end], is_first=start == 0, is_last=False)
        start = end
    yield Row(1, text[start:], is_first=start == 0)


_READERS: Mapping[str, Callable[[IO[bytes]], Iterator[Row | Broken]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "json": _json,
    "csv": lambda stream: _table(stream, ","),
    "tsv": lambda stream: _table(stream, "\t"),
    "parquet": lambda stream: (Row(*found) for found in parquet_rows(stream)),
    "arrow": lambda stream: (Row(*found) for found in arrow_rows(stream)),
}


def content_of(file: str) -> str:
    """Hash of a file's bytes; of a URL what its storage keeps instead (ETag, time, size)."""
    if "://" in file:
        files, path = import_fsspec(file).core.url_to_fs(file)
        with contextlib.suppress(NotImplementedError):
            return xxhash.xxh3_128_hexdigest(str(files.ukey(path)).encode())
    digest = xxhash.xxh3_128()
    try:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise unreadable(file, error) from None
    return digest.hexdigest()
