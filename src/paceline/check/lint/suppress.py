"""Findings that a comment answers: `# paceline: ignore[id] reason`.

The comment stands on the finding's line or on another line of the same statement, or alone on a
line above it. Commas part several ids; published names count too. Without a reason nothing is
suppressed.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.catalog.failure import failures_named, load_failures
from paceline.check.finding import Finding, Place, Severity
from paceline.check.lint.facts.source import comments_in

_COMMENT = re.compile(r"(?i)(?:#|//)\s*paceline:\s*ignore\b(?:\[([^\]]*)\])?[ \t]*(.*?)\s*$")
_ALONE = re.compile(r"^\s*(#|//)")


@dataclass(frozen=True, slots=True)
class Suppression:
    """One comment."""

    path: str
    line: int
    covers: int
    """The line whose findings it answers."""

    last: int
    """The last such line, where a statement goes over several."""

    names: tuple[str, ...]
    reason: str

    @property
    def ids(self) -> frozenset[str]:
        """Failures that it names; none where it gives no reason."""
        named = (one.id for name in self.names for one in failures_named(name))
        return frozenset(named if self.reason else ())


def suppressions_in(
    path: str, text: str, statements: Iterable[tuple[int, int]] = ()
) -> list[Suppression]:
    """Every suppressing comment of a file.

    Args:
        statements: First and last lines of statements, of which a comment covers the whole.
    """
    if "paceline:" not in text.lower():
        return []
    lines, spans = text.splitlines(), [one for one in statements if one[1] > one[0]]
    found = []
    comments = comments_in(text) if path.endswith(".py") else None
    for number, line in enumerate(lines, start=1):
        match = _COMMENT.search(line)
        if match is None or (comments is not None and number not in comments):
            continue  # what looks like a comment is in a string
        below = enumerate(lines[number:], start=number + 1)
        is_alone = _ALONE.match(line) is not None
        said = (at for at, one in below if one.strip() and not _ALONE.match(one))
        covers = next(said, len(lines) + 1) if is_alone else number
        covers, last = _whole_statement(covers, lines, spans)
        names = tuple(name.strip() for name in (match[1] or "").split(",") if name.strip())
        reason = match[2].strip(" -:")
        found.append(Suppression(path, number, covers, last, names, reason))
    return found


def _whole_statement(
    line: int, lines: Sequence[str], spans: Iterable[tuple[int, int]]
) -> tuple[int, int]:
    """The lines of the shortest statement around a line; those that `\\` joins are one."""
    around = [one for one in spans if one[0] <= line <= one[1]]
    first, last = min(around, key=lambda one: one[1] - one[0], default=(line, line))
    while 1 < first <= len(lines) and lines[first - 2].endswith("\\"):
        first -= 1
    while last < len(lines) and lines[last - 1].endswith("\\"):
        last += 1
    return first, last


def apply_suppressions(
    findings: Iterable[Finding], suppressions: Iterable[Suppression]
) -> tuple[list[Finding], list[Finding]]:
    """The findings that stay, with what is wrong with the comments; and those answered."""
    given = list(suppressions)
    by_place: dict[tuple[str, int], list[Suppression]] = {}
    for one in given:
        for line in range(one.covers, one.last + 1):
            by_place.setdefault((one.path, line), []).append(one)
    stay: list[Finding] = []
    answered: list[Finding] = []
    used: set[Suppression] = set()
    for finding in findings:
        around = by_place.get((finding.where.path, finding.where.line or 0), ())
        answer = next((one for one in around if finding.id in one.ids), None)
        (stay if answer is None else answered).append(finding)
        used |= {answer} if answer is not None else set()
    complaints = (_complaint(one, is_used=one in used) for one in given)
    return [*stay, *filter(None, complaints)], answered


def _complaint(one: Suppression, *, is_used: bool) -> Finding | None:
    severity = Severity.WARNING  # somebody counts on it, and it does nothing
    unknown = [name for name in one.names if not failures_named(name)]
    if not one.names:
        what, fix = "it names no finding", "# paceline: ignore[id] reason"
    elif unknown:
        what = f"no finding is called {', '.join(unknown)}"
        fix = "`paceline explain --list` has all ids"
    elif not one.reason:
        what = "it gives no reason, so it suppresses nothing"
        fix = f"# paceline: ignore[{', '.join(one.names)}] why it is right here"
    elif not is_used:
        what = f"nothing is found here that {', '.join(one.names)} would answer"
        fix, severity = "take the comment out", Severity.INFO
    else:
        return None
    where, what = Place(path=one.path, line=one.line), f"suppression: {what}"
    return Finding(id="lint-suppression", severity=severity, where=where, what=what, fix=fix)


def ids_of(name: str) -> frozenset[str]:
    """The ids that a name given on the command line stands for; empty when it is unknown."""
    known = load_failures()
    return frozenset({name} if name in known else (one.id for one in failures_named(name)))
