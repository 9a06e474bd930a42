"""One line of a verification: what was looked at, and what came out."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was looked at."""

    name: str
    status: Status
    what: str
    seen: float | None = None
    """The number that decides; relative, where nothing else is said."""

    allowed: float | None = None
    """The largest that is right."""

    where: str | None = None
    """Where a failure begins: the first step, module or parameter, and ranks."""

    why: str | None = None
    """What it looks like."""

    fix: str | None = None


def skipped(name: str, because: str) -> Line:
    """Not looked at, and why."""
    return Line(name=name, status="skip", what=because)


def judged(
    name: str,
    what: str,
    *,
    seen: float,
    allowed: float,
    where: str | None = None,
    why: str | None = None,
    fix: str | None = None,
) -> Line:
    """Right when what was seen is at most what is allowed; NaN never is."""
    if seen <= allowed:
        return Line(name=name, status="pass", what=what, seen=seen, allowed=allowed)
    return Line(
        name=name,
        status="fail",
        what=what,
        seen=seen,
        allowed=allowed,
        where=where,
        why=why,
        fix=fix,
    )
