"""What is wrong in a configuration, said of a place in it; and the findings that it makes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure at a place of the file that is read."""

    id: str
    at: int | Placed
    """What shows it; a line alone where its column is of no use."""

    what: str
    fix: str | None = None
    """None takes the catalog's."""

    level: Severity = ERROR
    """How far the file shows it."""

    seen: tuple[tuple[str, int, str], ...] = ()
    """Path, line and text of what else shows it; an empty path is the file's own."""

    renames: tuple[str, str] | None = None


def findings(path: str, faults: Iterable[Fault]) -> Iterator[Finding]:
    """The faults of one file as findings, at no higher level than their failures have in lint."""
    for fault in faults:
        line, column = (
            (fault.at, None) if isinstance(fault.at, int) else (fault.at.line, fault.at.column)
        )
        yield Finding(
            id=fault.id,
            severity=lint_level(fault.id, fault.level),
            where=Place(path=path, line=line, column=column),
            what=fault.what,
            fix=fault.fix if fault.fix is not None else load_failures()[fault.id].fix,
            evidence=tuple(
                Evidence(where=Place(path=file or path, line=number), text=text)
                for file, number, text in fault.seen
            ),
            renames=fault.renames,
        )
