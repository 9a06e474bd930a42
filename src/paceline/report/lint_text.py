"""Findings of `paceline lint` as text: the line, a caret under it, what is wrong, the fix."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from paceline.check.finding import Finding, Severity
from paceline.check.lint.lint import Linted
from paceline.job.secrets import find_secret

_WIDTH = 110
"""Letters of a source line that are shown."""


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
    first = max(0, start - _WIDTH // 2) if len(text) > _WIDTH else 0
    yield f"  {line:>5} | {text[first : first + _WIDTH]}"
    yield f"  {'':>5} | {' ' * (start - first)}^"


def _line(texts: Mapping[str, str], path: str, line: int | None) -> str | None:
    if line is None or path not in texts:
        return None
    lines = texts[path].split("\n")
    return lines[line - 1] if line <= len(lines) else None


def summary_line(linted: Linted, shown: Sequence[Finding], *, num_fixed: int) -> str:
    """How many of each, in how many files, and what can be done with one option."""
    counts = Counter(one.severity for one in linted.findings)
    number = len({*linted.kinds, *(one.where.path for one in linted.findings)})
    files = f"{number} file{'s' if number != 1 else ''}"
    if not linted.findings:
        text = f"{files}: nothing found"
    else:
        names = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "hint"}
        said = [
            f"{counts[one]} {name}{'s' if counts[one] != 1 else ''}"
            for one, name in names.items()
            if counts[one]
        ]
        text = f"{files}: {', '.join(said)}"
    hidden = len(linted.findings) - len(shown)
    if hidden:
        text += f" ({hidden} hidden; --severity info shows all)"
    if linted.answered:
        text += f"; {len(linted.answered)} suppressed by comments"
    if num_fixed:
        text += f"; `--fix` shows {num_fixed} safe repair{'s' if num_fixed != 1 else ''}"
    return text
