"""A finding of a configuration, from its place and what is said there."""

from collections.abc import Iterable

from paceline.catalog.failure import load_failures
from paceline.check.finding import Evidence, Finding, Place, Severity, lint_level

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def found(
    failure: str,
    path: str,
    line: int,
    what: str,
    *,
    fix: str | None = None,
    column: int | None = None,
    evidence: Iterable[tuple[str, int, str]] = (),
    level: Severity = ERROR,
) -> Finding:
    """One finding; without a nearer `fix` it has the catalog's. `evidence` is path, line, text."""
    return Finding(
        id=failure,
        severity=lint_level(failure, level),
        where=Place(path=path, line=line, column=column),
        what=what,
        fix=fix if fix is not None else load_failures()[failure].fix,
        evidence=tuple(
            Evidence(where=Place(path=one, line=number), text=text)
            for one, number, text in evidence
        ),
    )
