"""A file against the keys and values that its program's own classes know (`software.toml`)."""

import difflib
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import msgspec

from paceline.catalog.load import read_shipped
from paceline.check.finding import Severity
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import ERROR, INFO, Fault
from paceline.check.lint.context import Context, version_numbers

_TRUTHS = {"1", "0", "on", "off", "t", "f", "true", "false", "y", "n", "yes", "no"}
"""Texts read as a truth value, in any case: pydantic 2.14 and Accelerate 1.15's `str_to_bool`."""

_KINDS = {"bool": "true or false", "whole": "a whole number", "number": "a number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What some keys take."""

    names: str
    kind: Literal["words", "bool", "whole", "number"] = "words"
    words: str = ""
    """In any case; of another kind than words, what is taken besides."""

    cased: str = ""
    """Words that count in this case alone."""

    lowest: int | float = 0
    highest: int | float = inf
    """Both of numbers."""

    is_typed: bool = False
    """Whether a number or a truth value that stands in quotes fails."""

    only: str = ""
    """Key of the section and its values with which these are read; - where it is not given."""

    is_closed: bool = False
    """Whether no version knows another word; otherwise only what is nearly one is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One mapping of the file. Lists are texts with blanks between the words."""

    path: str = ""
    """Keys that lead to it."""

    keys: str = ""
    """Empty: any."""

    prefix: str = ""
    """What a key of the file has before the name that is listed, or may have."""

    otherwise: str
    """What becomes of another key."""

    near: Severity = ERROR
    """Level of a key that is nearly one of these, or one of another section."""

    far: Severity = ERROR
    comments: str = ""
    """Beginnings of keys that people write comments in."""

    is_home: bool = False
    """Whether people write its keys one level too high."""

    example: str = ""
    """The section written right, where another value than a mapping ends the start."""

    may_be_bool: bool = False
    since: str = ""
    """Version of the program from which on other keys matter."""

    values: tuple[Values, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What a program reads of its file."""

    id: str
    """Failure of what it does not know."""

    title: str
    package: str
    again: Severity
    """Level of a key that is given twice."""

    filled: str = ""
    """Word in place of a value that is filled in before the program reads it."""

    instead: dict[str, str] = field(default_factory=dict)
    """Key that people write -> where it belongs."""

    sections: tuple[Section, ...]

    def keys(self, path: str) -> frozenset[str]:
        """The keys of one section."""
        return frozenset(
            word for one in self.sections if one.path == path for word in one.keys.split()
        )


def load_schema(software: str) -> Schema:
    """The schema of a program in `software.toml`."""
    return msgspec.convert(read_shipped("software.toml")[software], Schema)


def check_schema(schema: Schema, document: Marked, context: Context) -> Iterator[Fault]:
    """Keys that nothing reads or that stand twice, and values that the program does not take."""
    version = context.version(schema.package)
    for section in schema.sections:
        inside = document.at(*section.path.split())
        if inside is None or inside.value is None:
            continue
        if isinstance(inside.value, dict):
            if section.keys and (version is None or version >= version_numbers(section.since)):
                yield from _check_keys(schema, section, inside)
            yield from _check_values(schema, section, inside)
        elif section.example and not (section.may_be_bool and isinstance(inside.value, bool)):
            what = f"{section.path} is {_shown(inside)}, and has to be a mapping: the start fails"
            yield Fault(schema.id, inside, what, section.example)


def _check_keys(schema: Schema, section: Section, inside: Marked) -> Iterator[Fault]:
    known = section.keys.split()
    title = section.path.rpartition(" ")[2] or schema.title
    strange = []
    for name, value in inside.entries():
        for old in value.again:
            what = f"{name} is given again here: its value in line {old.line} is lost"
            seen = (("", old.line, name),)
            yield Fault(schema.id, value, what, "keep one", schema.again, seen)
        short = name.removeprefix(section.prefix)
        if short in known or name.startswith(tuple(section.comments.split())):
            continue
        home = schema.instead.get(name) or next(
            (
                one.path
                for one in schema.sections
                if one.is_home and one is not section
                if name in {one.prefix + key for key in one.keys.split()}
            ),
            None,
        )
        near = difflib.get_close_matches(short, known, n=1, cutoff=0.7)
        if home or near:
            fix = f"move it into {home}" if home else f"write {section.prefix}{near[0]}"
            what = f"{title} has no key {name}: {section.otherwise}"
            yield Fault(schema.id, value, what, fix, section.near)
        else:
            strange.append((name, value))
    groups = [strange] if section.path and strange else [[one] for one in strange]
    for group in groups:
        names, keys = ", ".join(name for name, _ in group), "key" if len(group) == 1 else "keys"
        what = f"{title} has no {keys} {names}: {section.otherwise}"
        fix = f"take {'it' if len(group) == 1 else 'them'} out"
        yield Fault(schema.id, group[0][1], what, fix, section.far)


def _check_values(schema: Schema, section: Section, inside: Marked) -> Iterator[Fault]:
    for row in section.values:
        key, *wanted = row.only.split() or [""]
        if wanted and (inside.text(key) or "-") not in wanted:
            continue
        for name in row.names.split():
            value = inside.at(name)
            text = _shown(value) if value is not None else ""
            if value is None or value.value is None or (row.kind == "words" and not text):
                continue
            if re.search(r"[${}<>%]", text) or text == schema.filled != "":
                continue
            word = "no" if value.false() else text.lower()  # as YAML reads no
            if text in row.cased.split() or word in row.words.lower().split():
                continue
            check = _check_word if row.kind == "words" else _check_kind
            yield from check(schema.id, row, name, value)


def _check_word(id: str, row: Values, name: str, value: Marked) -> Iterator[Fault]:
    known = {word.lower(): word for word in (row.words + " " + row.cased).split()}
    near = difflib.get_close_matches(_shown(value).lower(), known, n=1, cutoff=0.7)
    listed = ", ".join(sorted(known.values()))
    what = f"{name} is {_shown(value)}, which is not one of {listed}"
    fix = f"write {known[near[0]]}" if near else "one of these"
    yield Fault(id, value, what, fix, ERROR if near or row.is_closed else INFO)


def _check_kind(id: str, row: Values, name: str, value: Marked) -> Iterator[Fault]:
    """A truth value or a number that is another one, outside its range, or in quotes."""
    is_text, text = isinstance(value.value, str), _shown(value)
    number = _number(value.value)
    if row.kind == "bool":
        is_good = isinstance(value.value, bool) or number in {0, 1} or text.lower() in _TRUTHS
        wanted, fix = _KINDS["bool"], f"{name}: true, or {name}: false"
    else:
        is_good = number is not None and row.lowest <= number <= row.highest
        if row.kind == "whole" and number is not None:
            is_good &= isinstance(number, int) or _is_whole(value.value)
        is_above = number is not None and number > row.highest
        limit = f" from {row.lowest} on" if row.lowest > -inf else ""
        wanted = _KINDS[row.kind] + (f" of at most {row.highest}" if is_above else limit)
        fix = f"write {wanted}" if is_above or not limit else f"{name}: {row.lowest}"
    is_quoted = is_good and is_text and row.is_typed
    if is_quoted:
        text, fix = f'the text "{text}"', f"{name}: {text}, without quotes"
    if not is_good or is_quoted:
        yield Fault(id, value, f"{name} is {text or 'empty'}: it has to be {wanted}", fix)


def _number(value: Any) -> int | float | None:
    """The number that a scalar is, or that its text stands for."""
    if isinstance(value, bool | int | float):
        return None if isinstance(value, bool) else value
    for kind in (int, float):
        with suppress(ValueError, TypeError):
            return kind(value)
    return None


def _is_whole(value: Any) -> bool:
    """Whether pydantic takes it as a whole number: 5e8 and "5.0", and not "5e8"."""
    if isinstance(value, str):
        return bool(re.fullmatch(r"\s*[-+]?\d+\.0*\s*", value))
    return bool(value % 1 == 0)


def _shown(value: Marked) -> str:
    if isinstance(value.value, dict | list):
        return "a mapping" if isinstance(value.value, dict) else "a list"
    return value.text() or ""
