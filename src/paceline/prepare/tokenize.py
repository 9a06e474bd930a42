"""Files to parts: rows are read here and tokenized in processes beside, a batch at a time.

Batches come back in order and only a few are under way, so memory is flat whatever the files' size,
and what is written does not depend on the number of processes.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import JobError
from paceline.prepare.documents import Batch, Encoder, Recipe
from paceline.prepare.parts import Part, PartWriter
from paceline.prepare.rows import Broken, Row, form_of, place_of, read_rows
from paceline.prepare.tokens import token_documents

Report = Callable[[int], None]
"""Is given the bytes of rows that were tokenized."""

_BATCH = 1 << 20
"""Characters that one process tokenizes at once, a guess: 0.4 s of work."""

_MOST_ROWS = 4096
"""Rows of a batch, however short."""

_SMALL = 8 << 20
"""Bytes of sources below which processes would start longer than they work (a guess)."""


class Workers:
    """Encodes batches, in processes or here."""

    def __init__(self, recipe: Recipe, pool: ProcessPoolExecutor | None, num_workers: int) -> None:
        self._recipe = recipe
        self._pool = pool
        self._ahead = 2 * num_workers if pool is not None else 0
        self._encoder = Encoder(recipe) if pool is None else None

    def encode_all(self, batches: Iterator[list[Row]]) -> Iterator[tuple[list[Row], Batch]]:
        """Each batch's rows and documents, in order."""
        if self._pool is None:
            assert self._encoder is not None, "without processes it is here"
            yield from ((rows, self._encoder.encode(rows)) for rows in batches)
            return
        under_way: deque[tuple[list[Row], Future[Batch]]] = deque()
        for rows in batches:
            under_way.append((rows, self._pool.submit(_encode, self._recipe, rows)))
            if len(under_way) > self._ahead:
                first, future = under_way.popleft()
                yield first, future.result()
        for rows, future in under_way:
            yield rows, future.result()


@contextmanager
def start_processes(
    num_bytes: int, num_processes: int | None
) -> Iterator[tuple[ProcessPoolExecutor | None, int]]:
    """Processes that tokenize, one a core; None where there is little to do."""
    count = num_processes or num_cores()
    if count == 1 or num_bytes < _SMALL:
        yield None, 1
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_one_thread)
    try:
        yield pool, count
    finally:
        pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _one_thread() -> None:
    """A process tokenizes with one thread; the others have the other cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


_encoders: dict[int, tuple[Recipe, Encoder]] = {}


def _encode(recipe: Recipe, rows: list[Row]) -> Batch:
    """In a process beside: the encoder is made once."""
    kept = _encoders.get(0)
    if kept is None or kept[0] != recipe:
        kept = _encoders[0] = (recipe, Encoder(recipe))
    return kept[1].encode(rows)


def make_part(folder: Path, file: str, recipe: Recipe, workers: Workers, report: Report) -> Part:
    """Tokenize one file into a part.

    Raises:
        JobError: D002, it cannot be read; D014, its template cannot be masked.
    """
    writer = PartWriter(folder, file, recipe.dtype)
    try:
        _fill(writer, file, recipe, workers, report)
        return writer.close()
    finally:
        writer.abandon()


def _fill(writer: PartWriter, file: str, recipe: Recipe, workers: Workers, report: Report) -> None:
    form = form_of(file)
    if form == "bin":
        for documents in token_documents(file, recipe):
            writer.add(Batch(documents=documents), len(documents))
            report(sum(document.tokens.nbytes for document in documents))
        return
    for rows, batch in workers.encode_all(_batches(file, form, writer)):
        if batch.refused is not None:
            raise not_maskable(file, form, recipe.train_on, *batch.refused)
        writer.add(batch, sum(row.is_last for row in rows))
        report(sum(_size(row) for row in rows))


def _batches(file: str, form: str, writer: PartWriter) -> Iterator[list[Row]]:
    rows: list[Row] = []
    size = 0
    for row in read_rows(file, form):
        if isinstance(row, Broken):
            writer.add(Batch(broken=[(row.number, row.reason)]), 1)
            continue
        rows.append(row)
        size += _size(row)
        if size >= _BATCH or len(rows) >= _MOST_ROWS:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _size(row: Row) -> int:
    """Characters of a row; of a row of columns, those of its texts (a list's as printed)."""
    if isinstance(row.value, dict):
        return sum(
            len(value) if isinstance(value, str) else len(repr(value))
            for value in row.value.values()
        )
    return len(row.value)


def not_maskable(file: str, form: str, train_on: str, number: int, reason: str) -> JobError:
    """D014: a row whose turns cannot be found in what the template writes."""
    other = "all, which trains on every token"
    if train_on == "assistant":
        other = "last, which needs only the last turn"
    return JobError.of(
        code="D014",
        what=f"the chat template does not show which text is the assistant's: {reason}",
        where=place_of(file, form, number),
        fix="give a template with {% generation %} around the assistant's text by "
        f"model.chat_template, or set data.train_on: {other}",
    )
