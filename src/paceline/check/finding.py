"""What a check concludes: which failure, where, how surely it is seen, and what to change."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from paceline.catalog.failure import load_failures


class Severity(StrEnum):
    """How much a finding matters to whoever starts this job."""

    ERROR = "error"
    """The run fails, hangs, or trains something else than is meant."""

    WARNING = "warning"
    """It does so under conditions that are likely, or wastes much."""

    INFO = "info"
    """Worth knowing; nothing has to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where something was seen. What is not known is None."""

    path: str
    """A file, as the reader named it; `-` is standard input."""

    line: int | None = None
    """From 1."""

    column: int | None = None
    """From 1."""

    rank: int | None = None
    host: str | None = None

    def __str__(self) -> str:
        parts = [self.path, *(str(number) for number in (self.line, self.column) if number)]
        who = [f"rank {self.rank}"] if self.rank is not None else []
        who += [self.host] if self.host is not None else []
        return ":".join(parts) + (f" ({', '.join(who)})" if who else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A line that shows it, as it stands in the file."""

    where: Place
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One failure seen in one place, in the reader's own names and numbers."""

    id: str
    """Id of the catalog's failure: `paceline explain ID` says why and how it shows."""

    severity: Severity
    where: Place
    what: str
    """What clashes, in the reader's own names and numbers."""

    fix: str
    """The change that fixes it here; the failure's own fix where nothing nearer is known."""

    evidence: tuple[Evidence, ...] = ()
    renames: tuple[str, str] | None = None
    """The word on this line that nothing reads, and the one to write there."""

    first: str | None = None
    """A statement to write first in the loop of this line."""

    def __post_init__(self) -> None:
        if self.id not in load_failures():
            raise ValueError(f"no failure {self.id} in the catalog explains this finding")
        object.__setattr__(self, "what", writable(self.what))
        object.__setattr__(self, "fix", writable(self.fix))


def lint_level(id: str, shown: Severity = Severity.ERROR) -> Severity:
    """The level of a failure in a file: what is shown there, and no higher than its catalogue row.

    Args:
        id: Id of the failure. One without a level is a hint.
        shown: How far what was read shows that it happens.
    """
    highest = Severity(load_failures()[id].lint or Severity.INFO)
    return max(highest, shown, key=list(Severity).index)


def writable(text: str) -> str:
    r"""The text with lone surrogates spelled out: a program's strings hold them, no output does.

    >>> writable("\ud800ring") == r"\ud800ring"
    True
    """
    return text.encode("utf-8", "backslashreplace").decode()


def in_reading_order(findings: Iterable[Finding]) -> list[Finding]:
    """By file, line and column; several at one place by their ids."""
    return sorted(
        findings,
        key=lambda one: (one.where.path, one.where.line or 0, one.where.column or 0, one.id),
    )


def finding_data(finding: Finding) -> dict[str, Any]:
    """What `--json` prints of it: the finding, and its failure's published ids and texts."""
    failure = load_failures()[finding.id]
    return asdict(finding) | {
        "title": failure.title,
        "published": list(failure.published),
        "why": failure.why,
        "not_to_confuse": failure.not_to_confuse,
    }
