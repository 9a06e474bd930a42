"""Ways distributed training fails, from `failures/*.toml`: how each shows, why, and the fix.

The one text of `paceline explain`, of the reference pages and of all findings of `lint`, `diagnose`
and `preflight`. What a finding says of one particular log or file is said in `check/`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

BENIGN = "benign"


class Effect(StrEnum):
    """What the failure does to the training."""

    FATAL = "fatal"
    HANG = "hang"
    SILENT = "silent"
    """Wrong results and no message."""

    DEGRADED = "degraded"
    """Slower than it need be."""

    WARNING = "warning"
    INFO = "info"
    SECONDARY = "secondary"
    """A consequence: never the cause while anything else is found."""

    FALLBACK = "fallback"
    """Said only when nothing else is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One way to fail. Texts are single paragraphs."""

    id: str
    title: str
    category: str
    """The file it is in: `hang`, `network`, `memory` ..."""

    effect: Effect
    frameworks: tuple[str, ...]
    published: tuple[str, ...]
    """Ids of the published sharp edges and validations that it answers to."""

    why: str
    fix: str
    not_to_confuse: str | None
    before: str | None
    """How it is seen before the run, in programs and settings."""

    during: str | None
    """How it is seen while the run goes on."""

    shows: tuple[str, ...]
    """Example lines as they stand in logs."""

    log: tuple[str, ...]
    """Regular expressions; a line that matches one is the failure."""

    weak_log: tuple[str, ...]
    """Regular expressions of lines that healthy runs or other failures print too."""

    sources: tuple[str, ...]
    """`owner/repository#number` of a thread, a paper, or a page of documentation."""

    found_in: tuple[str, ...]
    """Messages and the library sources that print them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenignLine:
    """A line that looks like an error and is none."""

    id: str
    log: tuple[str, ...]
    why: str
    matters_when: str
    """The condition under which it is worth a look after all."""

    shows: tuple[str, ...]


@cache
def load_failures() -> Mapping[str, Failure]:
    """Every known failure by its id, in the order of the files."""
    folder = files("paceline.catalog") / "failures"
    found: dict[str, Failure] = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        category, _, ending = entry.name.rpartition(".")
        if ending != "toml" or category == BENIGN:
            continue
        for name, row in tomllib.loads(entry.read_text(encoding="utf-8")).items():
            if name in found:
                raise ValueError(f"{name} is in {entry.name} and in {found[name].category}.toml")
            found[name] = _failure(name, category, row)
    return found


@cache
def load_benign_lines() -> tuple[BenignLine, ...]:
    """Every line that is known to mean nothing."""
    text = (files("paceline.catalog") / "failures" / f"{BENIGN}.toml").read_text(encoding="utf-8")
    return tuple(
        BenignLine(
            id=name,
            log=tuple(row["log"]),
            why=_paragraph(row["why"]),
            matters_when=_paragraph(row["matters_when"]),
            shows=tuple(row.get("shows", ())),
        )
        for name, row in tomllib.loads(text).items()
    )


def failures_named(name: str) -> tuple[Failure, ...]:
    """The failure of this id, or those that a published id stands for, in any case; or none."""
    wanted = name.casefold()
    known = load_failures().values()
    by_id = tuple(failure for failure in known if failure.id.casefold() == wanted)
    return by_id or tuple(failure for failure in known if wanted in failure.published)


_KEYS = {
    "title",
    "effect",
    "frameworks",
    "published",
    "why",
    "fix",
    "not_to_confuse",
    "before",
    "during",
    "shows",
    "log",
    "weak_log",
    "sources",
    "found_in",
}


def _failure(name: str, category: str, row: Mapping[str, Any]) -> Failure:
    if unknown := row.keys() - _KEYS:
        raise ValueError(
            f"{name} in {category}.toml has unknown keys: {', '.join(sorted(unknown))}"
        )
    return Failure(
        id=name,
        title=row["title"],
        category=category,
        effect=Effect(row["effect"]),
        frameworks=tuple(row.get("frameworks", ())),
        published=tuple(row.get("published", ())),
        why=_paragraph(row["why"]),
        fix=_paragraph(row["fix"]),
        not_to_confuse=_optional(row.get("not_to_confuse")),
        before=_optional(row.get("before")),
        during=_optional(row.get("during")),
        shows=tuple(row.get("shows", ())),
        log=tuple(row.get("log", ())),
        weak_log=tuple(row.get("weak_log", ())),
        sources=tuple(row.get("sources", ())),
        found_in=tuple(row.get("found_in", ())),
    )


def _optional(text: str | None) -> str | None:
    return None if text is None or text.strip() in {"", "-"} else _paragraph(text)


def _paragraph(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
