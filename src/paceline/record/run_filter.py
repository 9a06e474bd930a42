"""Which runs are wanted: `eval_loss<2 and layout~FSDP`, a small language that only compares.

A comparison is a field, one of `< <= > >= = != ~`, and a value; `~` is "contains", whatever the
case. They are joined with `and`, `or`, `not` and parentheses. A name with a dot is a setting of the
job. Nothing is evaluated by Python. A comparison with what is unknown does not hold, except `!=`;
`eval_loss=none` finds it.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from paceline.errors import JobError
from paceline.record.run_row import RunRow
from paceline.units import parse_bytes, parse_seconds

FIELDS: Mapping[str, str] = {field.name: str(field.type) for field in fields(RunRow)}
"""Field of a run -> its type."""

Get = Callable[[str], Any]
"""Name of a field or setting -> its value in one run."""

_NONE = ("none", "null", "unknown")

_MOST_CHARACTERS, _DEEPEST = 2000, 50

_TOKEN = re.compile(
    r"""\s*(?:(?P<sign><=|>=|!=|==|[<>=~()])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'"""
    r"""|(?P<word>[^\s<>=!~()"']+))"""
)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d)?")


@dataclass(frozen=True, slots=True)
class Where:
    """An expression that was read."""

    holds: Callable[[Get], bool]
    """Whether it holds of a run."""

    names: Mapping[str, str]
    """Name in the expression -> where in it that is, for messages."""


def read_where(text: str) -> Where:
    """What an expression asks.

    Raises:
        JobError: `R070`, it is not one; the place in it is shown.
    """
    return _Reader(text).read()


class _Reader:
    """Reads an expression from left to right; one method for each rule of its grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._names: dict[str, str] = {}

    def read(self) -> Where:
        if len(self._text) > _MOST_CHARACTERS:
            self._refuse(f"it is longer than {_MOST_CHARACTERS} characters", _MOST_CHARACTERS)
        holds = self._any_of()
        if self._peek() is not None:
            self._refuse("`and`, `or` or the end is expected here")
        return Where(holds, self._names)

    def _any_of(self) -> Callable[[Get], bool]:
        parts = [self._all_of()]
        while self._takes_word("or"):
            parts.append(self._all_of())
        return parts[0] if len(parts) == 1 else lambda get: any(part(get) for part in parts)

    def _all_of(self) -> Callable[[Get], bool]:
        parts = [self._one()]
        while self._takes_word("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda get: all(part(get) for part in parts)

    def _one(self) -> Callable[[Get], bool]:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"it goes deeper than {_DEEPEST} parentheses")
        if self._takes_word("not"):
            inner = self._one()
            found: Callable[[Get], bool] = lambda get: not inner(get)  # noqa: E731
        elif self._takes_sign("("):
            found = self._any_of()
            if not self._takes_sign(")"):
                self._refuse("`)` is expected here")
        else:
            found = self._comparison()
        self._depth -= 1
        return found

    def _comparison(self) -> Callable[[Get], bool]:
        start, match = self._at, self._peek()
        if match is None or match["word"] is None:
            self._refuse("the name of a field is expected here")
        name = match["word"]
        self._names.setdefault(name, self._place(match.start("word")))
        self._at = match.end()
        match = self._peek()
        sign = match["sign"] if match is not None else None
        if match is None or sign is None or sign in "()":
            self._refuse(f"one of < <= > >= = != ~ is expected after `{name}`")
        self._at = match.end()
        match = self._peek()
        if match is None or match["sign"] is not None:
            self._refuse(f"a value is expected after `{self._text[start : self._at].strip()}`")
        value = self._value(name, sign, match)
        self._at = match.end()
        return lambda get: _compare(get(name), sign, value)

    def _value(self, name: str, sign: str, match: re.Match[str]) -> Any:
        word, kind = match["word"], FIELDS.get(name, "")
        if word is None:
            return match["double"] if match["double"] is not None else match["single"]
        is_text = sign == "~" or "str" in kind
        try:
            value = _word(name, word) if not is_text or word.lower() in _NONE else word
        except ValueError as error:
            self._refuse(str(error))
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if sign in ("<", "<=", ">", ">="):
            if "str" in kind:
                self._refuse(f"`{name}` is a text: compare it with = != or ~")
            if not is_number and (kind or value is None):
                self._refuse(f"`{word}` is not a number, and `{name}` is one")
        has_numbers = ("int" in kind or "float" in kind) and "str" not in kind
        is_comparable = value is None or (isinstance(value, int | float) and math.isfinite(value))
        if has_numbers and sign != "~" and not is_comparable:
            self._refuse(f"`{word}` is not a number, and `{name}` is one")
        return value

    def _peek(self) -> re.Match[str] | None:
        if not self._text[self._at :].strip():
            return None
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            self._refuse("this is no part of an expression")
        return match

    def _takes_word(self, word: str) -> bool:
        match = self._peek()
        return self._takes(match, match is not None and (match["word"] or "").lower() == word)

    def _takes_sign(self, sign: str) -> bool:
        match = self._peek()
        return self._takes(match, match is not None and match["sign"] == sign)

    def _takes(self, match: re.Match[str] | None, is_it: bool) -> bool:
        if is_it and match is not None:
            self._at = match.end()
        return is_it

    def _refuse(self, what: str, at: int | None = None) -> NoReturn:
        rest = self._text[self._at :]
        start = at if at is not None else self._at + len(rest) - len(rest.lstrip())
        raise JobError.of(
            code="R070",
            what=f"the expression cannot be read: {what}",
            where=self._place(start),
            fix="write it like 'eval_loss<2 and layout~FSDP and train.learning_rate>=3e-4'. "
            f"Fields: {', '.join(FIELDS)}; or a setting of the job",
        )

    def _place(self, at: int) -> str:
        shown = self._text if len(self._text) <= 120 else f"{self._text[:120]} ..."
        return f"character {at + 1} of {shown!r}"


def _word(name: str, word: str) -> Any:
    """A word as the value that a field is compared with.

    Raises:
        ValueError: It is no size, time or date, which the field is.
    """
    if word.lower() in _NONE:
        return None
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return float(word)
    except ValueError:
        pass
    if name.endswith("_at") and _DATE.fullmatch(word):
        form = "%Y-%m-%dT%H:%M" if "T" in word else "%Y-%m-%d"
        return time.mktime(time.strptime(word, form))
    if name.endswith("_bytes"):
        return parse_bytes(word)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return parse_seconds(word)
    return word


def _compare(value: Any, sign: str, wanted: Any) -> bool:
    if sign in ("=", "=="):
        return _equal(value, wanted)
    if sign == "!=":
        return not _equal(value, wanted)
    if value is None or wanted is None:
        return False
    if sign == "~":
        return as_text(wanted).lower() in as_text(value).lower()
    if not isinstance(value, int | float) or not isinstance(wanted, int | float):
        return False
    if sign == "<":
        return value < wanted
    if sign == "<=":
        return value <= wanted
    return value > wanted if sign == ">" else value >= wanted


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return value == wanted
    if value is None or wanted is None:
        return value is wanted
    return as_text(value).lower() == as_text(wanted).lower()


def as_text(value: Any) -> str:
    """A value as people write it: whole numbers without their `.0`, lists by their parts."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list | tuple):
        return " ".join(map(as_text, value))
    return str(value)
