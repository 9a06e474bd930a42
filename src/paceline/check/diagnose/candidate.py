"""A failure that may be the cause, and how near to it: which failures follow from others.

The catalog's effect says most of it (`secondary` never wins over a cause). Beside it stands here
what is a cause of its own and yet often follows from a nearer one. Sources: the catalog's
`not_to_confuse`, and the threads in tests/check/logs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from paceline.catalog.failure import Effect, Failure
from paceline.catalog.load import read_shipped
from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.line import Line

_ROWS = read_shipped("precedence.toml")
SYMPTOMS = frozenset(_ROWS["symptoms"]["names"].split())
"""Causes where nothing nearer is seen. An exception of the program is nearer."""

YIELDS: Mapping[str, frozenset[str]] = {
    name: frozenset(nearer.split()) for name, nearer in _ROWS["yields"].items()
}
"""Failure -> those that are nearer to the cause when both are seen, whichever came first."""

GENERAL = frozenset(_ROWS["general"]["names"].split())
"""They say that something failed and not what: they yield to everything that says more."""

MINOR = frozenset(_ROWS["minor"]["names"].split())
"""Said as a note; a cause only where nothing else is seen."""


class Level(IntEnum):
    """How near to the cause a failure is: each level yields to those before it."""

    CAUSE = 0
    """It prints its own message and need not follow from anything."""

    EXCEPTION = 1
    """The program's own exception."""

    READ = 2
    """What a reader of dumps, stacks or NCCL's report concludes."""

    SYMPTOM = 3
    LIKELY_HANG = 4
    """What is likely where ranks waited and no line says why."""

    GENERAL = 5
    """It says that something failed and not what, or a nearer failure is seen (`YIELDS`)."""

    QUIET = 6
    """It makes a run slow or wrong without a word."""

    MINOR = 7
    FOLLOWS = 8
    """A consequence: never a cause from here on while a nearer one is seen."""

    MAY_FOLLOW = 9
    POSSIBLE = 10
    """Not proved, and something in the log speaks for it."""

    FITS = 11
    """Nothing speaks for it or against it."""


_BY_EFFECT = {
    Effect.SECONDARY: Level.FOLLOWS,
    Effect.INFO: Level.MINOR,
    Effect.SILENT: Level.QUIET,
    Effect.DEGRADED: Level.QUIET,
    Effect.WARNING: Level.QUIET,
    Effect.FALLBACK: Level.EXCEPTION,
}


def level_of(failure: Failure) -> Level:
    """The level of a failure that prints its own message."""
    if failure.id in MINOR and failure.effect is not Effect.SECONDARY:
        return Level.MINOR
    if failure.effect in _BY_EFFECT:
        return _BY_EFFECT[failure.effect]
    if failure.id in GENERAL:
        return Level.GENERAL
    return Level.SYMPTOM if failure.id in SYMPTOMS else Level.CAUSE


@dataclass(slots=True)
class Candidate:
    """A failure that may be the cause."""

    id: str
    level: Level
    confidence: Confidence
    lines: list[Line]
    what: str
    count: int = 1
    order: int = 0
    """Among those of its level: the lower first."""

    place: str | None = None
    rank: int | None = None
    notes: list[str] = field(default_factory=list)
    title: str | None = None
    check: str | None = None
    """What decides whether it is this one."""


def ranks_of(lines: Iterable[Line]) -> list[int]:
    """The ranks that lines are of, each once, in order."""
    return sorted({line.rank for line in lines if line.rank is not None})


def best_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One candidate for each failure: the surest, and all its lines."""
    best: dict[str, Candidate] = {}
    for each in candidates:
        known = best.get(each.id)
        if known is None or (each.level, each.order) < (known.level, known.order):
            if known is not None and each.confidence is not Confidence.CERTAIN:
                each.lines = known.lines if len(known.lines) > len(each.lines) else each.lines
            best[each.id] = each
    return list(best.values())
