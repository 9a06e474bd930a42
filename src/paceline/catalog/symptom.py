"""Symptoms with several well-known causes, from `symptoms/*.toml`, and what decides between them.

A symptom is what a log shows where it does not show why. Its causes are failures of the catalog, in
the order of how often threads confirmed them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from paceline.catalog._rows import make_row
from paceline.catalog.load import read_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyCause:
    """One failure that looks so."""

    id: str
    """The failure's id."""

    check: str
    """What the reader does to decide."""

    seen: re.Pattern[str] | None = None
    """What in a log speaks for it."""

    unless: re.Pattern[str] | None = None
    """What in a person's words speaks against it."""

    only: bool = False
    """Whether it is left out where nothing speaks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What several failures look like."""

    id: str
    title: str
    of: frozenset[str] = frozenset()
    """Failures whose message says no more than that."""

    log: tuple[re.Pattern[str], ...] = ()
    """Lines of it that no failure owns."""

    words: tuple[re.Pattern[str], ...] = ()
    """How people tell of it."""

    causes: tuple[LikelyCause, ...]
    """The most frequent first."""

    sources: tuple[str, ...]
    """`owner/repository#number` of threads that showed it."""


@cache
def load_symptoms() -> Mapping[str, Symptom]:
    """Every symptom by its id."""
    return {
        name: make_row(Symptom, row, where=name, file=f"symptoms/{stem}.toml", id=name)
        for name, (stem, row) in read_folder("symptoms").items()
    }
