"""Values of YAML, JSON and TOML texts that know the line they stand on."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import yaml

from paceline.check.lint.facts.source import Unreadable

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_NODES = 200_000
"""Far above any configuration; YAML aliases of aliases would never end."""


@dataclass(frozen=True, slots=True)
class Marked:
    """One value and its place. Of an entry of a mapping, the place is its key's."""

    value: Any
    """A scalar, a `dict[str, Marked]`, or a `list[Marked]`."""

    line: int
    column: int = 1
    again: tuple["Marked", ...] = field(default=())
    """Entries of the same key in the same mapping, of which only this last one counts."""

    text_line: int = 0
    """Line on which a scalar's own text starts; 0 where that is `line`."""

    def at(self, *path: str | int) -> "Marked | None":
        """The value below it at these keys and indices; None where there is none."""
        found: Marked | None = self
        for step in path:
            if found is None:
                return None
            inner = found.value
            if isinstance(inner, dict):
                found = inner.get(str(step))
            elif isinstance(inner, list) and isinstance(step, int) and step < len(inner):
                found = inner[step]
            else:
                return None
        return found

    def plain(self, *path: str | int) -> Any:
        """The value at these keys without places; None where there is none."""
        found = self.at(*path)
        return None if found is None else _plain(found)

    def text(self, *path: str | int) -> str | None:
        """The scalar at these keys as text; None where there is none, or no scalar."""
        found = self.at(*path)
        if found is None or found.value is None or isinstance(found.value, dict | list):
            return None
        value = found.value
        return str(value).lower() if isinstance(value, bool) else str(value)

    def number(self, *path: str | int) -> int | None:
        """The whole number at these keys, also where it is written as text."""
        text = self.text(*path)
        return int(text) if text is not None and re.fullmatch(r"-?\d{1,15}", text) else None

    def true(self, *path: str | int) -> bool:
        """Whether the value at these keys is true, as YAML, JSON or a text says it."""
        return (self.text(*path) or "").lower() in {"true", "yes", "on"}

    def false(self, *path: str | int) -> bool:
        """Whether the value is there and says no."""
        return (self.text(*path) or "").lower() in {"false", "no", "off"}

    def items(self, *path: str) -> "Iterator[Marked]":
        """Values of the list at these keys; of anything else nothing."""
        found = self.at(*path)
        yield from found.value if found is not None and isinstance(found.value, list) else ()

    def entries(self, *path: str) -> "Iterator[tuple[str, Marked]]":
        """Keys and values of the mapping at these keys; of anything else nothing."""
        found = self.at(*path)
        if found is not None and isinstance(found.value, dict):
            yield from found.value.items()

    def walk(self) -> "Iterator[Marked]":
        """This value and all below it."""
        yield self
        below = self.value.values() if isinstance(self.value, dict) else self.items()
        for each in below:
            yield from each.walk()


def _plain(marked: Marked) -> Any:
    value = marked.value
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


class Bomb(Unreadable):
    """Aliases of aliases that stand for more values than the text has letters."""


class NoParser(Unreadable):
    """What reads this language is not installed."""


def read_yaml(text: str) -> list[Marked]:
    """The documents of a YAML text that are not empty."""
    found = []
    try:
        loader = _Loader(text)
        try:
            while loader.check_node():
                document = _from_node(loader.get_node(), loader, [_MOST_NODES])
                if document.value is not None:
                    found.append(document)
        finally:
            loader.dispose()
    except OverflowError as error:
        if len(text) < _MOST_NODES:
            raise Bomb("its aliases stand for more values than it has letters", 1) from None
        raise Unreadable(str(error), 1) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Unreadable(error.problem or "not YAML", line) from None
    except RecursionError:
        raise Unreadable("nested too deeply", 1) from None
    except (yaml.YAMLError, ValueError) as error:
        raise Unreadable(str(error).partition("\n")[0] or "not YAML", 1) from None
    return found


def _from_node(node: Any, loader: Any, budget: list[int]) -> Marked:
    budget[0] -= 1
    if budget[0] < 0:
        raise OverflowError("too many values")
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, Marked] = {}
        for key, inner in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            value = _from_node(inner, loader, budget)
            if name == "<<" and isinstance(value.value, dict):
                entries = {**value.value, **entries}
                continue
            place = key.start_mark.line + 1, key.start_mark.column + 1
            _enter(entries, name, value, place, value.text_line or value.line)
        return Marked(entries, line, column)
    if isinstance(node, yaml.SequenceNode):
        return Marked([_from_node(each, loader, budget) for each in node.value], line, column)
    if node.style in {"|", ">"}:  # the text of a block starts on the line below its sign
        return Marked(node.value, line, column, text_line=line + 1)
    try:
        value = loader.construct_object(node, deep=True)
    except yaml.YAMLError:
        value = node.value
    return Marked(value, line, column)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]|[^\s\[\]{},:]+')


def read_json(text: str) -> Marked:
    """The value of a JSON text."""
    try:
        json.loads(text)
        tokens = _TOKEN.finditer(text)
        ends = [match.start() for match in re.finditer("\n", text)]
        return _of_token(next(tokens), tokens, ends)
    except json.JSONDecodeError as error:
        raise Unreadable(error.msg, error.lineno) from None
    except (ValueError, RecursionError):
        raise Unreadable("numbers or depth beyond what is read", 1) from None


def _of_token(token: re.Match[str], tokens: Iterator[re.Match[str]], ends: list[int]) -> Marked:
    """The value that begins with a token, of a text that is known to be JSON."""
    sign, place = token[0], _place(token.start(), ends)
    if sign == "[":
        inner = takewhile(lambda one: one[0] != "]", tokens)
        return Marked([_of_token(each, tokens, ends) for each in inner], *place)
    if sign != "{":
        return Marked(json.loads(sign), *place)
    entries: dict[str, Marked] = {}
    for key in takewhile(lambda one: one[0] != "}", tokens):
        value = _of_token(next(tokens), tokens, ends)
        _enter(entries, json.loads(key[0]), value, _place(key.start(), ends))
    return Marked(entries, *place)


def _enter(
    entries: dict[str, Marked], name: str, value: Marked, place: tuple[int, int], text_line: int = 0
) -> None:
    """Put an entry at the place of its key; those of the same name before it are kept in it."""
    old = entries.get(name)
    entries[name] = Marked(value.value, *place, (*old.again, old) if old else (), text_line)


def _place(offset: int, ends: list[int]) -> tuple[int, int]:
    """Line and column of an offset, by the offsets at which lines end."""
    line = bisect_left(ends, offset)
    return line + 1, offset - (ends[line - 1] if line else -1)
