"""Findings of `paceline lint` as text: the line, a caret under it, what is wrong, the fix."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from paceline.check.finding import Finding, Severity
from paceline.check.lint.lint import Linted
from paceline.job.secrets import find_secret
from paceline.report.table import COLUMNS
from paceline.units import counted

_WIDTH = 110
"""Letters of a source line that are shown at most."""

_MARGIN = 10
"""Letters before a source line: its number and the bar."""


def finding_lines(finding: Finding, texts: Mapping[str, str]) -> Iterator[str]:
    """One finding: where, what, the source line with a caret, the fix."""
    yield f"{finding.where}: {finding.severity.value}: {finding.what}  [{finding.id}]"
    source = _line(texts, finding.where.path, finding.where.line)
    if source is not None and (finding.id == "secret-in-file" or find_secret(source)):
        source = None  # is on no screen and in no log of a CI
    if source is not None and finding.where.line is not None and source.strip():
        yield from _shown(source, finding.where.line, finding.where.column)
    for one in finding.evidence:
        if (one.where.path, one.where.line) == (finding.where.path, finding.where.line):
            continue  # shown above
        yield f"  see {one.where}: {one.text.strip()[:_WIDTH]}"
    yield f"  fix: {finding.fix}"


def _shown(source: str, line: int, column: int | None) -> Iterator[str]:
    indent = len(source) - len(source.lstrip())
    text = source.replace("\t", " ").rstrip()
    start = column - 1 if column is not None and column <= len(text) else indent
    width = min(_WIDTH, COLUMNS.get() - _MARGIN)
    first = max(0, start - width // 2) if len(text) > width else 0
    yield f"  {line:>5} | {text[first : first + width]}"
    yield f"  {'':>5} | {' ' * (start - first)}^"


def _line(texts: Mapping[str, str], path: str, line: int | None) -> str | None:
    if line is None or path not in texts:
        return None
    lines = texts[path].split("\n")
    return lines[line - 1] if line <= len(lines) else None


_NAMES = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "hint"}


def _counts(of: Mapping[Severity, int]) -> str:
    return ", ".join(counted(of[one], name) for one, name in _NAMES.items() if one in of)


def summary_line(linted: Linted, shown: Sequence[Finding], *, num_fixed: int) -> str:
    """How many of each, in how many files, and what can be done with one option."""
    counts = Counter(one.severity for one in shown)
    hidden = Counter(one.severity for one in linted.findings) - counts
    number = len({*linted.kinds, *(one.where.path for one in linted.findings)})
    files = f"{number} file{'s' if number != 1 else ''}"
    if not linted.findings:
        text = f"{files}: nothing found"
    else:
        parts = [_counts(counts)] if counts else []
        if hidden:
            parts.append(f"{_counts(hidden)} hidden (shown with --severity info)")
        text = f"{files}: {'; '.join(parts)}"
    if linted.answered:
        text += f"; {len(linted.answered)} suppressed by comments"
    if num_fixed:
        text += f"; `--fix` shows {num_fixed} safe repair{'s' if num_fixed != 1 else ''}"
    return text
