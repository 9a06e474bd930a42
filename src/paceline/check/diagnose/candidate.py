"""A failure that may be the cause, while causes are weighed against each other."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.check.diagnose.conclusion import Confidence
from paceline.check.diagnose.line import Line
from paceline.check.diagnose.precedence import Level


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
