"""What is in data files: every row read once, counted and fingerprinted; no judgement.

Memory does not grow with the number of rows but for 13 bytes of each (`similar.py`). Leaves out:
what is right and wrong (`check/data.py`).
"""

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paceline.errors import JobError, did_you_mean
from paceline.prepare.columns import text_columns
from paceline.prepare.documents import Encoder, Recipe
from paceline.prepare.prepare import Step
from paceline.prepare.private import find_private
from paceline.prepare.rows import (
    Broken,
    Row,
    check_keys,
    decode_line,
    form_of,
    plain_row,
    read_rows,
    texts_in,
)
from paceline.prepare.schema import Schema
from paceline.prepare.similar import Fingerprints, Similar, place_numbers
from paceline.prepare.tokenizer import TokenizerFiles, load_tokenizer
from paceline.prepare.tokens import token_documents
from paceline.prepare.words import Hashes, Words, mixed, words_of

_BATCH, _MOST_ROWS = 1 << 20, 4096
"""Characters and rows that are looked at together, a guess."""

_SHOWN = 3
"""Places that are named of each sort."""

_MOST_COLUMNS = 4096
_MOST_CLASSES = 1000
"""Values of the label's column, above which they are no classes (a guess)."""

_LONG_TEXT = 50
_WORD_LENGTH = (3, 10)
_LEAST_LETTERS = 0.8
_MOST_REPEATED = 0.3
"""Words of a text whose quality is measured, their mean length, the least share of them with a
letter, and the largest share of repeated lines. Source: Gopher's rules, arXiv:2112.11446, table A1
and section A1.1."""


@dataclass(slots=True)
class Seen:
    """How often something was seen, and where first."""

    count: int = 0
    places: list[tuple[str, int]] = field(default_factory=list)
    """File and line; of a file without lines the row, from 1."""

    def add(self, file: str, number: int, count: int = 1) -> None:
        """Once more, or `count` times."""
        self.count += count
        if len(self.places) < _SHOWN and (file, number) not in self.places:
            self.places.append((file, number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is looked at, and with what."""

    files: Sequence[str]
    eval_files: Sequence[str] = ()
    schema: Schema | None = None
    columns: tuple[str, ...] = ()
    """Those whose text is compared and measured; empty: found by their names, else all."""

    label: str | None = None
    tokenizer: TokenizerFiles | None = None
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """File -> how a job makes documents of its rows."""

    seq_len: int | None = None
    near: float | None = 0.8
    """Jaccard similarity of near duplicates; None: not looked for."""


@dataclass(slots=True, kw_only=True)
class Survey:
    """What was seen."""

    rows: int = 0
    """Rows that could be read, for training."""

    blank_lines: int = 0
    """Between the rows of jsonl, which are no rows."""

    eval_rows: int = 0
    num_bytes: int = 0
    """Bytes of the files, as they are stored."""

    seen: dict[str, dict[str, Seen]] = field(default_factory=dict)
    """Check -> what of it -> how often and where."""

    columns: dict[str, dict[str, Seen]] = field(default_factory=dict)
    """Column -> type of its values -> how often."""

    compared: tuple[str, ...] = ()
    """Columns whose text was compared; empty is all."""

    label: str | None = None
    classes: dict[str, int] | None = None
    """Label -> rows; None where there are none, or too many to be classes."""

    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens -> rows."""

    similar: Similar = field(default_factory=Similar)
    pairs: dict[str, list[tuple[str, int, str, int, float]]] = field(default_factory=dict)
    """Kind -> file and line of a row, of one like it before, and their similarity."""

    def note(self, check: str, what: str, file: str, number: int, count: int = 1) -> None:
        """Something was seen."""
        self.seen.setdefault(check, {}).setdefault(what, Seen()).add(file, number, count)


def survey(asked: Asked, report: Callable[[Step], None]) -> Survey:
    """Read every row.

    Raises:
        JobError: A column that was named is not there (D022), the disk is full (D015), or a package
            is missing (R010).
    """
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        try:
            return _Reader(asked, Path(folder), report).read_all()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise JobError.of(
                code="D015",
                what=f"{folder} is full: fingerprints take 240 bytes of disk a row",
                where="TMPDIR",
                fix="set TMPDIR to a folder on a larger disk, or leave near duplicates out: "
                "--near 0 takes 24 bytes a row",
            ) from None


@dataclass(slots=True)
class _Batch:
    """Rows that are looked at together."""

    numbers: list[int] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    raw: list[Row] = field(default_factory=list)
    size: int = 0
    is_text: bool = False
    """Whether every value is a text, as in csv."""


class _Reader:
    """Goes through the files, once."""

    def __init__(self, asked: Asked, folder: Path, report: Callable[[Step], None]) -> None:
        self._asked = asked
        self._report = report
        self._kept = Fingerprints(folder, near=asked.near is not None)
        self._files = [*asked.files, *asked.eval_files]
        self._survey = Survey(num_bytes=sum(map(size_of, self._files)))
        self._done_bytes = 0
        self._shapes: dict[tuple[str, ...], Seen] = {}
        self._classes: Counter[str] = Counter()
        self._compared: dict[str, tuple[str, ...]] = {}
        self._encoders: dict[str, Encoder] = {}
        file = asked.tokenizer.file if asked.tokenizer is not None else None
        self._tokenizer = load_tokenizer(file) if file is not None else None

    def read_all(self) -> Survey:
        """The whole survey."""
        found = self._survey
        try:
            for number, file in enumerate(self._files):
                if number == len(self._asked.files):
                    found.rows = self._kept.num_rows
                self._read(number, file)
                self._done_bytes += size_of(file)
                self._report(Step(number + 1, len(self._files), self._done_bytes))
            if not self._asked.eval_files:
                found.rows = self._kept.num_rows
            found.eval_rows = self._kept.num_rows - found.rows
            similar = self._kept.compare(num_train=found.rows, threshold=self._asked.near or 1.0)
        finally:
            self._kept.close()
        found.similar = similar
        found.compared = tuple(dict.fromkeys(c for each in self._compared.values() for c in each))
        for kind, pairs in similar.examples.items():
            found.pairs[kind] = [(*self._at(a), *self._at(b), alike) for a, b, alike in pairs]
        if found.label is not None and len(self._classes) <= _MOST_CLASSES:
            found.classes = dict(self._classes.most_common())
        self._note_missing()
        return found

    def _at(self, row: int) -> tuple[str, int]:
        file, number = self._kept.place(row)
        return self._files[file], number

    def _note_missing(self) -> None:
        """Columns that some rows do not have."""
        for name in {name for shape in self._shapes for name in shape}:
            for shape, seen in self._shapes.items():
                if name not in shape:
                    (file, number), *_ = seen.places
                    self._survey.note("columns", name, file, number, seen.count)

    def _read(self, number: int, file: str) -> None:
        last = inside = 0
        try:
            form = form_of(file)
            if form == "bin":
                self._read_tokens(number, file)
                return
            if form == "text" and file.endswith(".json"):
                self._survey.note("broken-files", "it holds JSON that is no list of rows", file, 0)
                return
            for batch in self._batches(file, form):
                last = batch.numbers[-1]
                self._take(number, file, batch)
                inside += batch.size
                done = self._done_bytes + min(inside, size_of(file))
                self._report(Step(number, len(self._files), done))
        except JobError as error:
            (problem, *_) = error.problems
            if problem.code not in ("D002", "D021"):
                raise
            after = f", after row {last}" if last else ""
            self._survey.note("broken-files", f"{problem.what}{after}", file, last)

    def _batches(self, file: str, form: str) -> Iterator[_Batch]:
        is_arrow, is_text = form in ("parquet", "arrow"), form in ("csv", "tsv")
        batch = _Batch(is_text=is_text)
        last = 0
        for row in read_rows(file, form):
            if form == "jsonl":
                self._survey.blank_lines += row.number - last - 1
            last = row.number
            if isinstance(row, Broken):
                self._survey.note("broken-rows", row.reason, file, row.number)
                continue
            size = len(row.value) if isinstance(row.value, bytes | str) else 0
            try:
                value = decode_line(row.value) if isinstance(row.value, bytes) else row.value
                if isinstance(row.value, bytes):
                    check_keys(row.value, value)
            except (ValueError, RecursionError) as error:
                self._survey.note("broken-rows", _reason(error), file, row.number)
                continue
            if isinstance(value, str):
                value = {"text": value}
            elif is_arrow:
                value = plain_row(value)
            batch.numbers.append(row.number)
            batch.rows.append(value)
            batch.raw.append(row)
            batch.size += size or 64 * len(value)
            if batch.size >= _BATCH or len(batch.rows) >= _MOST_ROWS:
                yield batch
                batch = _Batch(is_text=is_text)
        if batch.rows:
            yield batch
        if not last:
            self._survey.note("empty-files", "no row", file, 0)

    def _take(self, number: int, file: str, batch: _Batch) -> None:
        texts = self._texts(file, batch)
        self._count_values(file, batch)
        if self._asked.schema is not None:
            for at, row in zip(batch.numbers, batch.rows, strict=True):
                for broken in self._asked.schema.broken(row, is_text=batch.is_text):
                    self._survey.note("schema", broken, file, at)
        for at, text in zip(batch.numbers, texts, strict=True):
            if not text.strip():
                self._survey.note("empty-rows", "no text", file, at)
        for place, check, kind in find_private(texts):
            self._survey.note(check, kind, file, batch.numbers[place])
        words = words_of(texts)
        self._measure_texts(file, batch.numbers, texts, words)
        self._measure_lengths(file, batch, texts)
        self._kept.add(
            text=_hashes(text if text.strip() else None for text in texts),
            label=_hashes(self._labels(file, batch)),
            place=place_numbers(number, batch.numbers),
            words=words.hashes,
            starts=words.starts,
        )

    def _texts(self, file: str, batch: _Batch) -> list[str]:
        columns = self._compared.get(file)
        if columns is None:
            columns = self._compared[file] = self._find_columns(file, batch)
        if len(columns) == 1:
            values = [row.get(columns[0]) for row in batch.rows]
            return [v if isinstance(v, str) else "\n".join(texts_in(v)) for v in values]
        label = self._survey.label
        return [
            "\n".join(
                text
                for name in columns or row
                if name in row and (columns or name != label)
                for text in texts_in(row[name])
            )
            for row in batch.rows
        ]

    def _find_columns(self, file: str, batch: _Batch) -> tuple[str, ...]:
        """
        Raises:
            JobError: D022, one that was asked for is not there.
        """
        names = {name for row in batch.rows for name in row}
        for name in (*self._asked.columns, *filter(None, [self._asked.label])):
            if name not in names:
                raise _no_column(name, names, file)
        default = next((name for name in ("label", "labels") if name in names), None)
        self._survey.label = self._asked.label or self._survey.label or default
        recipe = self._asked.recipes.get(file)
        own = recipe.columns.items() if recipe is not None else ()
        by_job = tuple(column for name, column in own if name != "label")
        return self._asked.columns or by_job or text_columns(names)

    def _count_values(self, file: str, batch: _Batch) -> None:
        columns = self._survey.columns
        for at, row in zip(batch.numbers, batch.rows, strict=True):
            shape = tuple(row)
            if len(columns) <= _MOST_COLUMNS:
                self._shapes.setdefault(shape, Seen()).add(file, at)
            for name, value in row.items():
                if value is None or value == "":
                    self._survey.note("nulls", name, file, at)
                    continue
                kinds = columns.get(name)
                if kinds is None:
                    if len(columns) > _MOST_COLUMNS:
                        continue
                    kinds = columns[name] = {}
                kind = type(value).__name__
                seen = kinds.get(kind)
                if seen is None:
                    seen = kinds[kind] = Seen()
                seen.add(file, at)

    def _labels(self, file: str, batch: _Batch) -> Iterator[str | None]:
        name = self._survey.label
        for row in batch.rows:
            value = row.get(name) if name is not None else None
            if value is None or isinstance(value, list | dict):
                yield None
                continue
            if len(self._classes) <= _MOST_CLASSES:
                self._classes[str(value)] += 1
            yield str(value)

    def _measure_texts(
        self, file: str, numbers: Sequence[int], texts: Sequence[str], words: Words
    ) -> None:
        counts = np.diff(words.starts)
        sums = np.append(0, np.cumsum(words.num_letters)), np.append(0, np.cumsum(words.has_letter))
        letters, with_letter = (np.diff(each[words.starts]) for each in sums)
        for place in np.flatnonzero(counts >= _LONG_TEXT).tolist():
            at, mean = numbers[place], letters[place] / counts[place]
            low, high = _WORD_LENGTH
            if mean > high or (mean < low and texts[place].isascii()):
                self._survey.note(
                    "text-quality", f"mean word not of {low}-{high} letters", file, at
                )
            if with_letter[place] < _LEAST_LETTERS * counts[place]:
                self._survey.note("text-quality", "under 80 % of words have a letter", file, at)
            lines = [line for line in texts[place].split("\n") if line.strip()]
            if len(lines) - len(set(lines)) > _MOST_REPEATED * len(lines):
                self._survey.note("text-quality", "over 30 % of lines are repeated", file, at)

    def _measure_lengths(self, file: str, batch: _Batch, texts: Sequence[str]) -> None:
        recipe = self._asked.recipes.get(file)
        if recipe is not None:
            encoder = self._encoders.setdefault(file, Encoder(recipe))
            self._measure_documents(file, encoder, batch.raw)
        elif self._asked.tokenizer is not None:
            lengths = (
                [len(text.encode(errors="replace")) for text in texts]
                if self._tokenizer is None
                else [
                    len(each.ids)
                    for each in self._tokenizer.encode_batch_fast(
                        list(texts), add_special_tokens=False
                    )
                ]
            )
            for at, length in zip(batch.numbers, lengths, strict=True):
                self._note_length(file, at, length)

    def _measure_documents(self, file: str, encoder: Encoder, rows: Sequence[Row]) -> None:
        """As the job makes them, with template and special tokens."""
        batch = encoder.encode(rows)
        if batch.refused is not None:
            number, reason = batch.refused
            self._survey.note("broken-rows", reason, file, number)
        for number, reason in batch.broken:
            self._survey.note("broken-rows", reason, file, number)
        for reason, count in batch.left_out.items():
            self._survey.note("empty-rows", reason, file, batch.examples[reason], count)
        for document in batch.documents:
            self._survey.lengths[len(document.tokens)] += 1
        most = self._asked.seq_len
        longer = [] if most is None else [d for d in batch.documents if len(d.tokens) > most + 1]
        if longer:
            self._survey.note("too-long", "rows", *self._first_longer(file, encoder, rows))
            self._survey.seen["too-long"]["rows"].count += len(longer) - 1

    def _first_longer(self, file: str, encoder: Encoder, rows: Sequence[Row]) -> tuple[str, int]:
        most = self._asked.seq_len or 0
        is_longer = (
            row
            for row in rows
            if any(len(d.tokens) > most + 1 for d in encoder.encode([row]).documents)
        )
        return file, next(is_longer, rows[0]).number

    def _note_length(self, file: str, number: int, length: int) -> None:
        self._survey.lengths[length] += 1
        if self._asked.seq_len is not None and length > self._asked.seq_len:
            self._survey.note("too-long", "rows", file, number)

    def _read_tokens(self, number: int, file: str) -> None:
        files = self._asked.tokenizer or TokenizerFiles(file=None, digest="", vocab=1 << 32)
        recipe = Recipe(kind="tokens", columns={}, tokenizer=files, train_on="all", dtype="uint32")
        at = 0
        for documents in token_documents(file, recipe):
            lengths = [len(document.tokens) for document in documents]
            tokens = np.concatenate([document.tokens for document in documents])
            numbers = list(range(at + 1, at + len(documents) + 1))
            for place, length in zip(numbers, lengths, strict=True):
                self._note_length(file, place, length)
            self._kept.add(
                text=np.asarray([document.key | 1 for document in documents], np.uint64),
                label=np.zeros(len(documents), np.uint64),
                place=place_numbers(number, numbers),
                words=mixed(tokens.astype(np.uint64) + np.uint64(1)),
                starts=np.append(0, np.cumsum(lengths)),
            )
            at += len(documents)
            self._report(Step(number, len(self._files), self._done_bytes))


def _hashes(texts: Iterator[str | None] | Any) -> Hashes:
    """Hash of each text; 0 of none."""
    return np.asarray(
        [
            0
            if text is None
            else xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) or 1
            for text in texts
        ],
        np.uint64,
    )


def _reason(error: BaseException) -> str:
    """Without the byte, which is another one in every row."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error).partition(" (byte")[0] or type(error).__name__


def size_of(file: str) -> int:
    """Bytes of a file as it is stored; 0 of a URL."""
    try:
        return 0 if "://" in file else os.stat(file).st_size
    except OSError:  # said when it is opened
        return 0


def _no_column(name: str, names: set[str], file: str) -> JobError:
    near = did_you_mean(name, names)
    return JobError.of(
        code="D022",
        what=f"no row has a column `{name}`; there are {', '.join(sorted(names))}",
        where=file,
        fix=near or "name columns that are there",
    )
