"""Rows of a file, one at a time: lines of jsonl, items of a json array, rows of csv, parquet and
arrow files, or a whole text. Compressed files (gz, zst) and URLs of fsspec are streamed.

What cannot be read as a row comes as a `Broken` one, with its place and the reason.
"""

import codecs
import csv
import gzip
import importlib
import io
import json
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import msgspec

from paceline.errors import JobError
from paceline.job.corpus import holds_rows
from paceline.job.packages import import_package
from paceline.job.sources import import_fsspec

PIECE = 1 << 20
"""Characters of a text that are tokenized at once: a tokenizer's time and memory for one piece grow
with its length. A longer text is cut after a line's end (a guess at where tokens end too)."""

_MOST_OF_A_FIELD = 1 << 30
"""Characters in one field of a csv file; Python's own limit is 131,072."""

MOST_OF_A_LINE = 1 << 29
"""Bytes of a line of jsonl that are read into memory, a guess; Python's texts of it take four times
as much."""

_ROWS_AT_ONCE = 1024
"""Rows of a parquet file that are in memory at once, a guess."""

_START = 8192
"""Bytes of a file of another name that are looked at."""


class Row(NamedTuple):
    """One row of a file."""

    number: int
    """Line of the row, or its place counted from 1."""

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


_DAMAGED = (OSError, EOFError, zlib.error, msgspec.DecodeError, csv.Error)


@contextmanager
def open_source(file: str) -> Iterator[IO[bytes]]:
    """A file or a URL for reading, decompressed by its name.

    Raises:
        JobError: D002, it cannot be opened, or what is read from it is damaged; R010, a package is
            missing.
    """
    damaged: tuple[type[Exception], ...] = _DAMAGED
    try:
        with import_fsspec(file).open(file) if "://" in file else open(file, "rb") as stream:
            if file.endswith(".gz"):
                yield gzip.GzipFile(fileobj=stream)  # type: ignore[misc]
            elif file.endswith(".zst"):
                need = f"{file} is compressed with zstandard"
                zstandard = import_package("zstandard", need, where=file)
                damaged = (*damaged, zstandard.ZstdError)
                reader = zstandard.ZstdDecompressor()
                yield io.BufferedReader(reader.stream_reader(stream, read_across_frames=True))
            else:
                yield stream
    except damaged as error:
        raise unreadable(file, error) from None


def unreadable(file: str, error: Exception) -> JobError:
    """D002 for a source file."""
    reason = getattr(error, "strerror", None) or error
    return JobError.of(
        code="D002",
        what=f"{file} cannot be read: {reason}",
        where=file,
        fix="make it readable, or leave it out of the sources",
    )


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
        start = stream.read(_START)
    if holds_rows("", start):
        return "json" if start.lstrip().startswith(b"[") else "jsonl"
    return "text"


def place_of(file: str, form: str, number: int) -> str:
    """`chats.jsonl line 17`, `faq.parquet row 3`; of a text the file alone."""
    if form == "text":
        return file
    return f"{file} {'line' if form in ('jsonl', 'csv', 'tsv') else 'row'} {number}"


def read_rows(file: str, form: str) -> Generator[Row | Broken, None, None]:
    """All rows of a file, in order.

    Raises:
        JobError: D002, the file cannot be read at all.
    """
    with open_source(file) as stream:
        if form not in ("parquet", "arrow", "bin"):
            _check_encoding(file, stream)
        yield from _READERS[form](stream)


_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""UTF-32's first: in little endian it begins like UTF-16's."""


def _check_encoding(file: str, stream: IO[bytes]) -> None:
    if hasattr(stream, "peek"):
        start = stream.peek(4)
    else:
        start = stream.read(4)
        stream.seek(0)
    for mark, name in _BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            raise JobError.of(
                code="D002",
                what=f"{file} is {name} text, by the byte-order mark it begins with, and UTF-8 is "
                f"read: iconv -f {name} -t UTF-8 {shlex.quote(file)} > NEW converts it",
                where=file,
                fix="give the converted file",
            )


def decode_line(line: bytes) -> Any:
    """The columns in a line of jsonl.

    Raises:
        ValueError: It holds something else.
    """
    value = msgspec.json.decode(line)
    if not isinstance(value, dict):
        raise ValueError(f"the line holds {type(value).__name__}, not columns in {{}}")
    return value


def check_keys(line: bytes, columns: Mapping[str, Any]) -> None:
    """See that no column stands twice in a line of jsonl: decoders keep the last and are silent.

    Raises:
        ValueError: One does, by name.
    """
    if all(line.count(f'"{name}"'.encode()) < 2 for name in columns):
        return  # the rest costs ten times as much as decoding

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs) and found.keys() == columns.keys():
            twice = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
            raise ValueError(f"the column {twice} stands twice: the last one counts")
        return found

    json.loads(line, object_pairs_hook=once)


def _jsonl(stream: IO[bytes]) -> Iterator[Row | Broken]:
    """Lines as bytes: whoever tokenizes decodes them, beside others."""
    number = 0
    while line := stream.readline(MOST_OF_A_LINE):
        number += 1
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) == MOST_OF_A_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(MOST_OF_A_LINE)
            yield Broken(number, f"the line is longer than {MOST_OF_A_LINE >> 20} MiB")
        elif line and not line.isspace():
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
    with io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as text:
        rows = csv.DictReader(text, delimiter=delimiter, strict=True)
        names = rows.fieldnames or ()
        if len(set(names)) < len(names):
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            yield Broken(1, f"the header names column {twice} twice: the last one counts")
        while True:
            start = rows.reader.line_num + 1  # the error comes where the file ends
            try:
                values = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Broken(start, str(error))
                continue
            if None in values or None in values.values():
                yield Broken(rows.line_num, f"it has not the {len(rows.fieldnames or ())} columns")
            elif not _is_unicode("".join(values.values())):
                yield Broken(rows.line_num, "it is not UTF-8")
            else:
                yield Row(rows.line_num, values)


def _is_unicode(text: str) -> bool:
    """Whether it has no bytes that could not be decoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def _arrow(stream: IO[bytes], *, is_parquet: bool) -> Iterator[Row | Broken]:
    """Rows of parquet, of an arrow file, or of an arrow stream as `datasets` saves it."""
    need = "parquet and arrow files are read by pyarrow"
    pyarrow = import_package("pyarrow", need, where="data")
    start = stream.read(6)
    stream.seek(0)
    try:
        if is_parquet:
            file = importlib.import_module("pyarrow.parquet").ParquetFile(stream)
            batches = file.iter_batches(batch_size=_ROWS_AT_ONCE)
        elif start == b"ARROW1":
            file = pyarrow.ipc.open_file(stream)
            batches = map(file.get_batch, range(file.num_record_batches))
        else:
            batches = pyarrow.ipc.open_stream(stream)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        yield from (Row(number, values) for number, values in enumerate(rows, 1))
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from None


_READERS: Mapping[str, Callable[[IO[bytes]], Iterator[Row | Broken]]] = {
    "text": _text,
    "jsonl": _jsonl,
    "json": _json,
    "csv": lambda stream: _table(stream, ","),
    "tsv": lambda stream: _table(stream, "\t"),
    "parquet": lambda stream: _arrow(stream, is_parquet=True),
    "arrow": lambda stream: _arrow(stream, is_parquet=False),
}


def texts_in(value: Any) -> Iterator[str]:
    """Every value of a row's field as text, however deep it is."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)
    elif value is not None:
        yield str(value)


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Values of arrow as JSON has them: dates as texts, not-a-numbers as nothing."""
    plain: dict[str, Any] = msgspec.to_builtins(row, enc_hook=str)
    return {name: None if value != value else value for name, value in plain.items()}
