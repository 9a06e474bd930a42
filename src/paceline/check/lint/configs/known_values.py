"""Settings that take one of a few words: a word that is none of them, with the nearest."""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.catalog.load import read_shipped
from paceline.check.finding import Finding
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import ERROR, INFO, found


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting and its words, in any case."""

    section: str
    """Empty at the top level."""

    names: tuple[str, ...]
    values: frozenset[str]
    is_closed: bool = False
    """Whether no version knows another word; otherwise only what is nearly one is an error."""


def check_values(path: str, config: Marked, choices: Iterable[Choice]) -> Iterator[Finding]:
    """Words that the program ends at when it reads the file."""
    for choice in choices:
        inside = config.at(choice.section) if choice.section else config
        for name in choice.names:
            value = inside.at(name) if inside is not None else None
            if value is not None:
                yield from _check(path, name, value, choice)


def _check(path: str, name: str, value: Marked, choice: Choice) -> Iterator[Finding]:
    text = "no" if value.false() else value.text()  # YAML reads the plain word so
    if text is None or not text or value.value is None or re.search(r"[${}<>%]", text):
        return
    known = {one.lower(): one for one in choice.values}
    if text.lower() in known:
        return
    near = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.7)
    what = f"{name} is {text}, which is not one of {', '.join(sorted(choice.values))}"
    fix = f"write {known[near[0]]}" if near else "one of these"
    yield found(
        "config-unknown-key",
        path,
        value,
        what,
        fix,
        level=ERROR if near or choice.is_closed else INFO,
    )


def _choices(software: str) -> tuple[Choice, ...]:
    return tuple(
        Choice(
            section=row["section"],
            names=tuple(row["names"].split()),
            values=frozenset(row["values"].split()),
            is_closed=row.get("closed", False),
        )
        for row in read_shipped("software.toml")[software]["choices"]
    )


ACCELERATE = _choices("accelerate")
"""Constants and enumerations of accelerate 1.15, `utils/constants.py` and `dataclasses.py`, and
words that older ones wrote."""
