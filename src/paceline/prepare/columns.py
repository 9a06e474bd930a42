"""What the rows of a source are, found from the columns of the first one."""

from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain, islice
from pathlib import PurePath
from typing import Any, NamedTuple

from paceline.errors import JobError
from paceline.job import Job
from paceline.job.sources import Source
from paceline.prepare.rows import Broken, decode_line, form_of, place_of, read_rows

_OF_KIND: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "chat": (
        ("messages",),
        ("conversations",),
        ("instruction", "output"),
        ("prompt", "completion"),
    ),
    "completion": (("prompt", "completion"), ("instruction", "output")),
    "preference": (("chosen", "rejected"),),
    "classification": (("text", "label"),),
    "text": (("text",),),
    "tokens": (("tokens",),),
}
"""Kind -> the sets of columns that it can be read from, the first found counts."""

_FOUND_ALONE = (
    ("messages", "chat"),
    ("conversations", "chat"),
    ("completion", "completion"),
    ("output", "chat"),
    ("tokens", "tokens"),
    ("text", "text"),
)
"""A column -> the kind that it shows, without `data.kind`."""

_OTHER_NAMES = {
    "text": ("text", "content"),
    "tokens": ("input_ids", "tokens"),
    "label": ("label", "labels"),
    "system": ("system", "system_prompt"),
}
"""Names that a column commonly goes by; `columns` says others."""

_ALSO: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("chat", "messages"): ("system", "tools"),
    ("chat", "conversations"): ("system", "tools"),
    ("chat", "instruction"): ("input", "system", "history", "tools"),
    ("chat", "prompt"): ("system", "history", "tools"),
    ("completion", "instruction"): ("input", "system", "history"),
    ("completion", "prompt"): ("system", "history"),
    ("preference", "chosen"): ("prompt", "system", "tools"),
}
"""Kind and first column -> columns that are read where they are there."""

_SHOWN = 3
"""Broken rows that are named."""

_MOST_LABELS = 200
"""Labels that are still classes; CLINC150, of the larger ones, has 150. A guess."""

_TOKEN_FILES = ("bin",)


class Rows(NamedTuple):
    """What the rows of a source are."""

    kind: str
    columns: dict[str, str]
    """What a column is -> its name."""

    unread: tuple[str, ...] = ()
    """Columns of the first row that are not read."""


def find_kind(job: Job, source: Source, *, has_template: bool) -> Rows:
    """The kind of a source's rows, what each column that is read is called, and the other ones.

    Args:
        has_template: Whether instructions can be written as conversations.

    Raises:
        JobError: D016, no column is one that is known; D013, no row can be read.
    """
    asked = job.spec.data.kind
    form, row = _first_row(source)
    if form in _TOKEN_FILES:
        return Rows("tokens", {})
    if row is None:
        if asked == "auto" and PurePath(source.files[0]).suffix.lower() == ".json":
            raise _one_value(source)
        if asked in ("auto", "text"):
            return Rows("text", {})
        raise _unknown(job, source, None, asked)
    names = set(row)
    known = _known_columns(source.columns, names)
    kind = asked if asked != "auto" else _kind_of(known, has_template)
    if asked == "auto":
        _check_asked_for(source, set(known), kind)
    for wanted in _OF_KIND.get(kind, ()):
        if set(wanted) <= set(known):
            if wanted == ("prompt", "completion") and isinstance(row[known["completion"]], list):
                kind = "chat"
            also = {**source.columns, **known}
            more = [name for name in _ALSO.get((kind, wanted[0]), ()) if name in also]
            columns = {name: also[name] for name in (*wanted, *more)}
            unread = tuple(str(name) for name in row if name not in columns.values())
            has_messages = kind == "preference" and isinstance(row[columns["chosen"]], list)
            return Rows("chat preference" if has_messages else kind, columns, unread)
    raise _unknown(job, source, names, kind)


def guess_kind(source: Source) -> str:
    """What the rows of a source most likely are, before there is a job: a `data.kind`.

    Raises:
        JobError: D013 or D018, no row can be read.
    """
    form, row = _first_row(source)
    if form in _TOKEN_FILES:
        return "tokens"
    if not isinstance(row, Mapping):
        return "text"
    known = _known_columns({}, set(row))
    asked = (kind for kind in ("preference", "classification") if {*_OF_KIND[kind][0]} <= {*known})
    return next(asked, _kind_of(known, has_template=True))


def labels_of(source: Source, *, most: int) -> list[str]:
    """The names of the classes in the first rows of each file, in their order. Rows that cannot be
    read or have no label are passed over; empty where there are too many to be classes."""
    found: set[str] = set()
    for file in source.files:
        with closing(read_rows(file, form_of(file))) as rows:
            for row in islice(rows, most):
                if isinstance(row, Broken):
                    continue
                with suppress(ValueError):  # preparation names these lines
                    value = decode_line(row.value) if isinstance(row.value, bytes) else row.value
                    column = _known_columns({}, set(value)).get("label")
                    found.add(label_name(value.get(column)) or "")
                if len(found) > _MOST_LABELS:
                    return []
    return sorted(found - {""})


def label_name(label: Any) -> str | None:
    """What `data.labels` calls the class of a row's label; None for what is no label.

    >>> label_name(True), label_name(2.0), label_name("pos"), label_name(0.5)
    ('true', '2', 'pos', None)
    """
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():  # pandas' numbers beside missing ones
        label = int(label)
    return str(label) if isinstance(label, str | int) else None


def _one_value(source: Source) -> JobError:
    return JobError.of(
        code="D016",
        what=f"{source.files[0]} holds JSON that is no list of rows",
        where=source.where,
        fix="write its rows as a list, [{...}, {...}], or one on each line (jsonl); to train on "
        "the raw JSON as text, set data.kind: text",
    )


def _check_asked_for(source: Source, known: set[str], kind: str) -> None:
    """D016, the rows hold what only `data.kind` says how to train on."""
    if {"chosen", "rejected"} <= known:
        what = "pairs of chosen and rejected answers"
        fix = "set data.kind: preference to tune with them; to train on the chosen ones alone, "
        fix += "data.kind: completion with columns: {completion: chosen}"
    elif kind == "text" and "label" in known:
        what = "texts with a label"
        fix = "set data.kind: classification and data.labels to train a classifier; to train on "
        fix += "the texts alone, data.kind: text"
    elif {"completion", "label"} <= known:
        what = "completions with a label, whose bad ones would be trained on too"
        fix = "keep the good ones alone, without the label; to train on all of them, set "
        fix += "data.kind: completion"
    else:
        return
    raise JobError.of(
        code="D016", what=f"the rows of {source.name} are {what}", where=source.where, fix=fix
    )


def _first_row(source: Source) -> tuple[str, Any]:
    form = "text"
    broken: list[str] = []
    for file in source.files:
        form = form_of(file)
        if form in ("text", *_TOKEN_FILES):
            return form, None
        with closing(read_rows(file, form)) as rows:
            for row in rows:
                if isinstance(row, Broken):
                    reason = row.reason
                else:
                    try:
                        is_line = isinstance(row.value, bytes)
                        return form, decode_line(row.value) if is_line else row.value
                    except ValueError as error:
                        is_encoded = not isinstance(error, UnicodeDecodeError)
                        reason = str(error) if is_encoded else "it is not UTF-8"
                if len(broken) < _SHOWN:
                    broken.append(f"{place_of(file, form, row.number)}: {reason}")
    if broken:
        raise JobError.of(
            code="D013",
            what=f"no row of {source.name} can be read: " + "; ".join(broken),
            where=source.where,
            fix="repair these rows, or leave the files out",
        )
    raise JobError.of(
        code="D018",
        what=f"{source.name} has no readable row in {len(source.files)} files",
        where=source.where,
        fix="give files with rows",
    )


def text_columns(names: set[str]) -> tuple[str, ...]:
    """Columns that are read as text or conversation, of those that are there.

    >>> text_columns({"id", "prompt", "completion"})
    ('completion', 'prompt')
    """
    known = _known_columns({}, names)
    return tuple(sorted({known[name] for name in known if name not in ("label", "tokens")}))


def _known_columns(given: Mapping[str, str], names: set[str]) -> dict[str, str]:
    """What is known of the columns that are there -> its column."""

    def find() -> Iterator[tuple[str, str]]:
        groups = chain(*_OF_KIND.values(), _ALSO.values())
        for name in {column for group in groups for column in group}:
            for column in (given[name],) if name in given else _OTHER_NAMES.get(name, (name,)):
                if column in names:
                    yield name, column
                    break

    return dict(find())


def _kind_of(known: Mapping[str, str], has_template: bool) -> str:
    for column, kind in _FOUND_ALONE:
        if column in known:
            return "completion" if column == "output" and not has_template else kind
    return "unknown"


def _unknown(job: Job, source: Source, names: set[str] | None, kind: str) -> JobError:
    has = f"the columns {', '.join(sorted(map(str, names)))}" if names is not None else "no columns"
    asked = "" if kind == "unknown" else f"; data.kind {kind} reads "
    groups = _OF_KIND.get(kind, ())
    needed = ", ".join(f"{column}: NAME" for column in (groups or (("text",),))[0])
    asked += " or ".join(" and ".join(group) for group in groups)
    return JobError.of(
        code="D016",
        what=f"{source.name} ({source.files[0]}) has {has}{asked}",
        where=source.where,
        fix=f"map them: sources: [{{path: ..., columns: {{{needed}}}}}], with what a column is on "
        "the left and its name in the rows on the right",
    )
