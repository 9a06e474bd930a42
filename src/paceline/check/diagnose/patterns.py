"""The catalog's expressions, and those of our own readers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from paceline.catalog.failure import load_benign_lines, load_failures
from paceline.catalog.load import read_shipped


class Kind(StrEnum):
    """What a pattern's line is for."""

    LOG = "log"
    """A failure of the catalog."""

    WEAK = "weak"
    """Perhaps a failure of the catalog."""

    BENIGN = "benign"
    """A line that looks like an error and is none."""

    READER = "reader"
    """Something that one of our readers takes apart: tracebacks, exit codes, NCCL's report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One expression and what it is of."""

    name: str
    kind: Kind
    text: re.Pattern[str]


READERS: Mapping[str, Sequence[str]] = read_shipped("log_lines.toml")["readers"]
"""Reader -> the lines it wants."""


_FLAGS = re.MULTILINE | re.IGNORECASE
"""Libraries change the case of their messages: JAX's `Coordination service` was `coordination`."""


@cache
def all_patterns() -> tuple[Pattern, ...]:
    """Every expression, the catalog's first."""
    found = []
    for failure in load_failures().values():
        for kind, texts in ((Kind.LOG, failure.log), (Kind.WEAK, failure.weak_log)):
            found += [
                Pattern(name=failure.id, kind=kind, text=re.compile(text, _FLAGS))
                for text in texts
                if "\\n" not in text  # reaches over lines: `judge` knows those
            ]
    found += [
        Pattern(name=name, kind=Kind.READER, text=re.compile(text, re.MULTILINE))
        for name, texts in READERS.items()
        for text in texts
    ]
    found += [
        Pattern(name=line.id, kind=Kind.BENIGN, text=re.compile(text, _FLAGS))
        for line in load_benign_lines()
        for text in line.log
    ]
    return tuple(found)


@cache
def benign() -> re.Pattern[str]:
    """A line that looks like an error and is none."""
    texts = [f"(?:{text})" for line in load_benign_lines() for text in line.log]
    return re.compile("|".join(texts), re.IGNORECASE)
