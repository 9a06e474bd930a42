"""Rows of parquet and arrow files, read a batch at a time by pyarrow (extra `data`)."""

from collections.abc import Iterator
from typing import IO, Any

from paceline.errors import JobError

_ROWS_AT_ONCE = 1024
"""Rows of a parquet file that are in memory at once, a guess."""


def parquet_rows(stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and columns of each row, counted from 1."""
    _import_pyarrow()
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(stream).iter_batches(batch_size=_ROWS_AT_ONCE)
        yield from _rows(batches)
    except _import_pyarrow().ArrowInvalid as error:
        raise OSError(str(error)) from None


def arrow_rows(stream: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """As of parquet, of an arrow file, or of a stream as `datasets` saves it."""
    pyarrow = _import_pyarrow()
    start = stream.read(6)
    stream.seek(0)
    try:
        if start == b"ARROW1":
            file = pyarrow.ipc.open_file(stream)
            yield from _rows(file.get_batch(number) for number in range(file.num_record_batches))
        else:
            yield from _rows(pyarrow.ipc.open_stream(stream))
    except pyarrow.ArrowInvalid as error:
        raise OSError(str(error)) from None


def _rows(batches: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            yield number, values


def _import_pyarrow() -> Any:
    """
    Raises:
        JobError: R010, it is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise JobError.of(
            code="R010",
            what="parquet and arrow files are read by pyarrow, which is not installed",
            where="data",
            fix='pip install "paceline[data]"',
        ) from None
    return pyarrow
