"""A finding of a configuration, from its place and what is said there."""

from collections.abc import Iterable
from typing import Protocol

from paceline.catalog.failure import load_failures
from paceline.check.finding import Evidence, Finding, Place, Severity, lint_level

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


class Placed(Protocol):
    """A value, word or variable that knows its place."""

    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int | None: ...


def found(
    failure: str,
    path: str,
    at: "int | Placed",
    what: str,
    fix: str | None = None,
    *,
    column: int | None = None,
    evidence: Iterable[tuple[str, int, str]] = (),
    level: Severity = ERROR,
) -> Finding:
    """One finding; without a nearer `fix` it has the catalog's.

    Args:
        at: What shows it; a line alone where its column is of no use.
        evidence: Path, line and text of what else shows it.
    """
    line, column = (at, column) if isinstance(at, int) else (at.line, at.column)
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


def bf16_finding(path: str, line: int, said: str, gpu: str) -> Finding:
    """bf16 asked for on a GPU before Ampere."""
    what = f"{said} asks for bf16, which {gpu} does not have"
    fix = "fp16 with loss scaling, or an Ampere GPU or newer"
    return found("bf16-unsupported-gpu", path, line, what, fix)
