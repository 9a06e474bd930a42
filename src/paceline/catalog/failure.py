"""Ways distributed training fails: how each shows, why, and the fix. Those that only a rule of
`lint` finds are beside it (`check/lint/rules/*.toml`), the others in `failures/*.toml`.

The one text of `paceline explain`, of the reference pages and of all findings of `lint`, `diagnose`
and `preflight`. What a finding says of one particular log or file is said in `check/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from paceline.catalog._rows import make_row
from paceline.catalog.load import read_folder, read_rows

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
    """The page it is on: `hang`, `network`, `memory` ... Of `failures/*.toml` the file."""

    effect: Effect
    at_start: bool = False
    """Whether it shows before the first step ends, and never after many."""

    frameworks: tuple[str, ...] = ()
    lint: str | None = None
    """The highest level that `lint` gives it: `error`, `warning` or `info`; None: it finds none.

    No row is set by hand: benchmarks/lint_levels.py derives it from what the claim rests on and how
    often it was right in others' code, and a test holds them together."""

    published: tuple[str, ...] = ()
    """Ids of the published sharp edges and validations that it answers to."""

    why: str
    fix: str
    not_to_confuse: str | None = None
    shows: tuple[str, ...] = ()
    """Example lines as they stand in logs."""

    log: tuple[str, ...] = ()
    """Regular expressions; a line that matches one is the failure."""

    weak_log: tuple[str, ...] = ()
    """Regular expressions of lines that healthy runs or other failures print too."""

    sources: tuple[str, ...] = ()
    """`owner/repository#number` of a thread, a paper, or a page of documentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenignLine:
    """A line that looks like an error and is none."""

    id: str
    log: tuple[str, ...]
    why: str
    matters_when: str
    """The condition under which it is worth a look after all."""

    shows: tuple[str, ...] = ()


@cache
def load_failures() -> Mapping[str, Failure]:
    """Every known failure by its id, category by category."""
    found = {
        name: make_row(
            Failure, row, where=name, file=f"failures/{category}.toml", id=name, category=category
        )
        for name, (category, row) in read_folder("failures").items()
        if category != BENIGN
    }
    for name, (rule, row) in read_folder("rules", package="check/lint").items():
        if name in found:
            raise ValueError(f"{name} is in {rule}.toml of the rules and in failures/")
        found[name] = make_row(
            Failure, row, where=name, file=f"check/lint/rules/{rule}.toml", id=name
        )
    return dict(sorted(found.items(), key=lambda pair: pair[1].category))


@cache
def load_benign_lines() -> tuple[BenignLine, ...]:
    """Every line that is known to mean nothing."""
    return tuple(read_rows(f"failures/{BENIGN}.toml", BenignLine, key="id").values())


def failures_named(name: str) -> tuple[Failure, ...]:
    """The failure of this id, or those that a published id stands for, in any case; or none."""
    wanted = name.casefold()
    known = load_failures().values()
    by_id = tuple(failure for failure in known if failure.id.casefold() == wanted)
    return by_id or tuple(failure for failure in known if wanted in failure.published)
