"""Symptoms with several well-known causes, from `symptoms/*.toml`, and what decides between them.

A symptom is what a log shows where it does not show why. Its causes are failures of the catalog, in
the order of how often threads confirmed them.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyCause:
    """One failure that looks so."""

    id: str
    """Of the failure."""

    check: str
    """What the reader does to decide."""

    seen: re.Pattern[str] | None
    """What in a log speaks for it."""

    only: bool
    """Whether it is left out where nothing speaks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What several failures look like."""

    id: str
    title: str
    of: frozenset[str]
    """Failures whose message says no more than that."""

    log: tuple[re.Pattern[str], ...]
    """Lines of it that no failure owns."""

    causes: tuple[LikelyCause, ...]
    """The most frequent first."""

    sources: tuple[str, ...]
    """`owner/repository#number` of threads that showed it."""


@cache
def load_symptoms() -> Mapping[str, Symptom]:
    """Every symptom by its id.

    Raises:
        ValueError: A key is not known, or an id is there twice.
    """
    found: dict[str, Symptom] = {}
    folder = files("paceline.catalog") / "symptoms"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".toml"):
            continue
        for name, row in tomllib.loads(entry.read_text(encoding="utf-8")).items():
            if name in found:
                raise ValueError(f"the symptom {name} is there twice")
            found[name] = _symptom(name, row)
    return found


def _symptom(name: str, row: Mapping[str, Any]) -> Symptom:
    _check_keys(name, row, {"title", "of", "log", "causes", "sources"})
    return Symptom(
        id=name,
        title=row["title"],
        of=frozenset(row.get("of", ())),
        log=tuple(re.compile(text, re.MULTILINE) for text in row.get("log", ())),
        causes=tuple(_cause(name, each) for each in row["causes"]),
        sources=tuple(row["sources"]),
    )


def _cause(name: str, row: Mapping[str, Any]) -> LikelyCause:
    _check_keys(name, row, {"id", "check", "seen", "only"})
    return LikelyCause(
        id=row["id"],
        check=row["check"],
        seen=re.compile(row["seen"], re.MULTILINE) if "seen" in row else None,
        only=row.get("only", False),
    )


def _check_keys(name: str, row: Mapping[str, Any], known: set[str]) -> None:
    if unknown := row.keys() - known:
        raise ValueError(f"the symptom {name} has unknown keys: {', '.join(sorted(unknown))}")
