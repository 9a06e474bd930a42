"""Rows of a catalog file, shipped or a reader's own: which keys there are, by the fields of their
dataclass, and every mistake in a row as a `Problem`.

Leaves out: what the rows mean; see `accelerator.py`, `link.py` and `price.py`.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date, timedelta
from functools import cache, partial
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from paceline import units
from paceline.errors import Problem, did_you_mean

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What may stand under one key of a row."""

    read: Callable[[Any], Any]
    """Turns the value into plain SI, or raises `ValueError` with what was expected."""

    required: bool = False


def text(value: object) -> str:
    """Words. Those of several lines become one paragraph."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("text")
    return " ".join(value.split()) if "\n" in value else value


def texts(value: object) -> tuple[str, ...]:
    """A list of words."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError('a list of text, such as ["H100 80GB HBM3"]')
    return tuple(value)


def text_table(value: object) -> Mapping[str, str]:
    """A table of words."""
    if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError("a table of text")
    return dict(value)


def truth(value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def count(value: object) -> int:
    """A whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number above 0")
    return value


def whole(value: object) -> int:
    """A whole number that is 0 or more."""
    return 0 if value == 0 and not isinstance(value, bool) else count(value)


def number(value: object) -> float:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError("a number above 0")
    return float(value)


def amount(value: object) -> float:
    """A number that is 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError("a number that is not negative")
    return float(value)


def day(value: object) -> str:
    """A day, or `by` a day; TOML has days too."""
    found = re.fullmatch(r"(?:by )?(\d{4}-\d\d-\d\d)", str(value))
    try:
        date.fromisoformat(found[1] if found else "")
    except ValueError:
        raise ValueError("a day, such as 2026-09-01") from None
    return str(value)


def past_day(value: object) -> str:
    """A day that has come: tomorrow is today in another time zone."""
    told, today = day(value), date.today()
    if date.fromisoformat(told.removeprefix("by ")) > today + timedelta(days=1):
        raise ValueError(f"the day of the price list, which has come: this machine has {today}")
    return told


def share(value: object) -> float:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1")
    return float(value)


def size(value: object) -> int:
    """Bytes, or text with a unit of bytes."""
    if isinstance(value, str):
        value = units.parse_bytes(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return count(value)


def rate(value: object) -> float:
    """Bytes per second, or text with a unit."""
    return number(units.parse_bytes_per_s(value) if isinstance(value, str) else value)


def one_of(*choices: str) -> Callable[[object], str]:
    """One of some words."""

    def read(value: object) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return str(value)

    return read


def keys_of(kind: type[Any], *, without: Iterable[str]) -> dict[str, Key]:
    """What a row may hold, from the fields of its dataclass: the type says what is read, the end of
    the name its unit, and a reader in `Annotated` comes before both. A field without a default is
    required.

    Args:
        without: Fields that are not read from a row.
    """
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: Key(
            read=_reader(field.name, hints[field.name]),
            required=field.default is MISSING and field.default_factory is MISSING,
        )
        for field in fields(kind)
        if field.name not in without
    }


def _reader(name: str, hint: Any) -> Callable[[Any], Any]:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return cast("Callable[[Any], Any]", parts[1])
    if origin is Literal:
        return one_of(*parts)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(_table, hint)
    if origin is tuple and is_dataclass(parts[0]):
        return lambda rows: tuple(_table(parts[0], row) for row in rows)
    if origin is Mapping and is_dataclass(parts[1]):
        return lambda rows: {key: _table(parts[1], row) for key, row in rows.items()}
    if hint is float:
        return (
            rate if name.endswith("bytes_per_s") else share if name.endswith("_share") else number
        )
    if hint is int:
        return size if name.endswith("_bytes") else count
    known: dict[Any, Callable[[Any], Any]] = {
        bool: truth,
        str: text,
        tuple[str, ...]: texts,
        Mapping[str, str]: text_table,
    }
    return known.get(hint) or partial(_converted, hint)


def _table(kind: type[_T], row: object) -> _T:
    if not isinstance(row, Mapping):
        raise ValueError("a table")
    return make_row(kind, row, where=kind.__name__, file="the row")


def _converted(hint: Any, value: object) -> Any:
    return msgspec.convert(value, hint, dec_hook=_compiled)


def _compiled(_: type, pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


@cache
def _keys(kind: Any, without: frozenset[str]) -> dict[str, Key]:
    return keys_of(kind, without=without)


def make_row(kind: type[_T], row: Mapping[str, Any], *, where: str, file: str, **given: Any) -> _T:
    """A shipped row as its dataclass.

    Args:
        row: What the row holds: the fields that are not given.

    Raises:
        ValueError: Everything that is wrong with the row.
    """
    schema: Any = kind  # of which mypy doubts that it can be hashed
    keys = _keys(schema, frozenset(given))
    return kind(**checked_row(keys, row, where=where, file=file), **given)


def checked_row(
    keys: Mapping[str, Key], row: Mapping[str, Any], *, where: str, file: str
) -> dict[str, Any]:
    """The values of a shipped row.

    Raises:
        ValueError: Everything that is wrong with the row.
    """
    optional = NOT_OF.get(where, ())
    values, problems = read_row(keys, row, where=where, file=file, optional=optional)
    if problems:
        raise ValueError("; ".join(f"{each.where}: {each.what}, {each.fix}" for each in problems))
    return values


NOT_OF = {"cpu": ("memory_bytes",)}
"""Row -> what it lacks although others have it: a CPU's memory is read from the machine."""


_OWN_KEYS = ("like", "aliases", "kinds", "smi_names", "before")
"""Keys that `like` does not take over: a spelling stands for one row, and so does a version."""

_BY_KEY = ("sources", "tensor")
"""Tables of a row that are laid over key by key."""


def with_likes(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows, each laid over the earlier row that its `like` names.

    >>> with_likes({"a": {"x": 1, "y": 2, "aliases": ["b"]}, "c": {"like": "a", "y": 3}})["c"]
    {'x': 1, 'y': 3}
    """
    whole: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        whole[name] = {**row} if "like" not in row else laid_over(whole[row["like"]], row)
    return whole


def laid_over(base: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the file over the one that it is `like`."""
    own = {key: value for key, value in row.items() if key != "like"}
    whole = {key: value for key, value in base.items() if key not in _OWN_KEYS} | own
    for key in _BY_KEY:
        if isinstance(base.get(key), Mapping) and isinstance(own.get(key, {}), Mapping):
            whole[key] = {**base[key], **own.get(key, {})}
    return whole


def read_row(
    keys: Mapping[str, Key],
    row: Mapping[str, Any],
    *,
    where: str,
    file: str,
    optional: Iterable[str] = (),
) -> tuple[dict[str, Any], list[Problem]]:
    """The row's values in plain SI, and everything that is wrong with it.

    Args:
        keys: What a row of this table may hold.
        where: The row for messages, such as `links.fast`.
        optional: Keys that this one row may lack, though others must have them.
    """
    hint = (
        ""
        if where.startswith(("prices", "line"))
        else ', or `like = "..."` to take it from a known row'
    )
    problems = list(_unknown_keys(keys, row, where=where, file=file))
    problems += [
        Problem(
            code="T012",
            what=f"`{where}` has no `{name}`",
            where=f"{where} in {file}",
            fix=f"add {name}{hint}",
        )
        for name, key in keys.items()
        if key.required and name not in row and name not in optional
    ]
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name not in keys:
            continue
        try:
            values[name] = keys[name].read(value)
        except ValueError as error:
            problems.append(
                Problem(
                    code="T013",
                    what=f"`{name}` is {value!r}",
                    where=f"{where}.{name} in {file}",
                    fix=str(error) if "write" in str(error) else f"write {error}",
                )
            )
    return values, problems


def _unknown_keys(
    keys: Iterable[str], row: Mapping[str, Any], *, where: str, file: str
) -> Iterator[Problem]:
    for name in row:
        if name not in keys:
            yield unknown_key(name, keys, where=where, file=file)


def unknown_key(name: str, known: Iterable[str], *, where: str, file: str) -> Problem:
    """A key or a table that a catalog file cannot have, with the nearest that it can."""
    known = list(known)
    return Problem(
        code="T011",
        what=f"`{name}` is no key of {where}",
        where=f"{where} in {file}",
        fix=did_you_mean(name, known, cutoff=0.4) or f"known are {', '.join(known)}",
    )


def no_such(code: str, kind: str, name: str, known: Mapping[str, str], where: str) -> Problem:
    """A name that is not there, with the nearest ones.

    Args:
        kind: What was looked for, such as `accelerator`.
        known: Every spelling that is accepted -> the name it stands for.
        where: Place for the message.
    """
    by_lower = {spelling.lower(): found for spelling, found in known.items()}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.4)
    nearness = [difflib.SequenceMatcher(None, name.lower(), each).ratio() for each in matches]
    matches = [
        each for each, near in zip(matches, nearness, strict=True) if near > 0.9 * nearness[0]
    ]
    longer = [spelling for spelling in by_lower if spelling.startswith(name.lower())]
    near = list(dict.fromkeys(by_lower[match] for match in [*longer, *matches]))[:2]
    names = list(dict.fromkeys(known.values()))
    everything = ", ".join(names)
    if near:
        tail = f"Known are {everything}" if len(names) <= 12 else "`paceline catalog` lists all"
        fix = f"did you mean {' or '.join(f'`{each}`' for each in near)}? {tail}"
    else:
        fix = f"choose one of {everything}"
    return Problem(code=code, what=f"the catalog has no {kind} `{name}`", where=where, fix=fix)
