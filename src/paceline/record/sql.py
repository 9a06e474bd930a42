"""The runs of a folder as SQL that sqlite3 and PostgreSQL both load: tables, then their rows.

Loading it again replaces the rows of its runs and leaves other rows as they are, so that several
folders can be kept in one database as long as no two runs have the same name.

Leaves out: checkpoints' contents, logs and events.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from paceline.record.checkpoints import list_checkpoints
from paceline.record.events import Evaluated, read_events
from paceline.record.metric_names import numbers_of, numbers_of_evaluation
from paceline.record.metrics import read_metrics
from paceline.record.registry import Listing, list_runs
from paceline.record.run_files import RunFiles
from paceline.record.run_filter import as_text
from paceline.record.run_row import RunRow

_TYPES = {str: "TEXT", int: "BIGINT", float: "DOUBLE PRECISION", bool: "BOOLEAN"}
_RUN = {"run": "TEXT NOT NULL REFERENCES runs (run)"}
_NUMBER, _TEXT, _STEP = "DOUBLE PRECISION", "TEXT NOT NULL", "BIGINT NOT NULL"


_NAMES = {"commit": "git_commit"}  # a word of SQL in sqlite


def _column(kind: Any) -> str:
    either = get_args(kind)
    return _TYPES[either[0]] if either else f"{_TYPES[kind]} NOT NULL"


TABLES: Mapping[str, tuple[Mapping[str, str], str]] = {
    "runs": (
        {_NAMES.get(field.name, field.name): _column(field.type) for field in fields(RunRow)},
        "run",
    ),
    "run_settings": (_RUN | {"name": _TEXT, "value": "TEXT"}, "run, name"),
    "run_packages": (_RUN | {"name": _TEXT, "version": _TEXT}, "run, name"),
    "run_metrics": (_RUN | {"step": _STEP, "name": _TEXT, "value": _NUMBER}, "run, step, name"),
    "run_checkpoints": (
        _RUN | {"step": _STEP, "path": _TEXT, "complete": "BOOLEAN NOT NULL", "eval_loss": _NUMBER},
        "run, step",
    ),
}
"""Table -> its columns with their types, and its primary key."""

_ROWS = 500
"""Rows of one INSERT: a statement of some tens of kilobytes. A guess."""


def registry_sql(runs: Path) -> tuple[Listing, Iterator[str]]:
    """The runs directly below a folder, and the statements that keep them, in one transaction.

    Statements are made as they are asked for, one run's metrics in memory at a time.
    """
    listing = list_runs(runs, settings=True)
    return listing, _statements(listing)


def _statements(listing: Listing) -> Iterator[str]:
    yield "BEGIN;\n"
    for table, (columns, key) in TABLES.items():
        lines = [*(f"{name} {kind}" for name, kind in columns.items()), f"PRIMARY KEY ({key})"]
        yield f"CREATE TABLE IF NOT EXISTS {table} (\n  " + ",\n  ".join(lines) + "\n);\n"
    for row in listing.rows:
        for table in reversed(list(TABLES)):
            yield f"DELETE FROM {table} WHERE run = {_literal(row.run)};\n"
        for table, rows in _rows(row, listing.settings.get(row.run, {})):
            head = f"INSERT INTO {table} ({', '.join(TABLES[table][0])}) VALUES\n"
            texts = (f"({', '.join(map(_literal, each))})" for each in rows)
            while some := list(islice(texts, _ROWS)):
                yield head + ",\n".join(some) + ";\n"
    yield "COMMIT;\n"


def _rows(
    row: RunRow, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Iterable[tuple[object, ...]]]]:
    """Table -> one run's rows in it."""
    files = RunFiles(Path(row.folder))
    yield "runs", [tuple(getattr(row, field.name) for field in fields(RunRow))]
    values = ((name, None if value is None else as_text(value)) for name, value in settings.items())
    yield "run_settings", ((row.run, *each) for each in values)
    start = files.last_start()
    if start is not None:
        found = start.packages | ({"python": start.python} if start.python else {})
        yield "run_packages", ((row.run, *each) for each in found.items())
    yield "run_metrics", ((row.run, *each) for each in _numbers(files))
    yield (
        "run_checkpoints",
        (
            (row.run, each.step, str(each.path), each.is_complete, each.held_out_loss)
            for each in list_checkpoints(files.folder / "checkpoints")
        ),
    )


def _numbers(files: RunFiles) -> Iterator[tuple[int, str, float | None]]:
    """Step, name and value; None is what was not finite, or not measured in that step. A name that
    has no value in any step is left out."""
    steps = {line.step: numbers_of(line) for line in read_metrics(files.folder / "metrics.jsonl")}
    for event in read_events(files.folder / "events.jsonl"):
        if isinstance(event, Evaluated):
            steps[event.step] = steps.get(event.step, {}) | numbers_of_evaluation(event)
    measured = {
        name for step in steps.values() for name, value in step.items() if value is not None
    }
    for step, numbers in sorted(steps.items()):
        yield from ((step, name, value) for name, value in numbers.items() if name in measured)


def _literal(value: object) -> str:
    """A value in standard SQL; a number that is not finite is NULL.

    >>> _literal("it's"), _literal(True), _literal(None), _literal(1e-05)
    ("'it''s'", 'TRUE', 'NULL', '1e-05')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "NULL"
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).encode("utf-8", "replace").decode()  # a path may hold any bytes
    return "'" + text.replace("\0", "\ufffd").replace("'", "''") + "'"
