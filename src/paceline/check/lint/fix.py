"""Fixes that need no judgement, as changed texts: one small edit for each finding it knows.

A fix that does not apply exactly is left out: the finding then stays for the reader. A changed
Python file that no longer parses is left as it was.
"""

import ast
import difflib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.check.finding import Finding


@dataclass(frozen=True, slots=True)
class Edit:
    """Text between two offsets, replaced. Equal offsets insert."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A file as it would be."""

    path: str
    before: str
    after: str
    findings: tuple[Finding, ...]
    """Those that the change fixes."""

    @property
    def diff(self) -> str:
        """Unified, as `patch -p1` and `git apply` take it."""
        lines = difflib.unified_diff(
            re.findall(r"[^\n]*\n|[^\n]+", self.before),
            re.findall(r"[^\n]*\n|[^\n]+", self.after),
            f"a/{self.path}",
            f"b/{self.path}",
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )


def fix_files(findings: Sequence[Finding], texts: Mapping[str, str]) -> list[Fixed]:
    """Every file that changes."""
    fixed = []
    fixable = {one.where.path for one in findings if one.id in _FIXES}
    for path, whole in texts.items():
        if path not in fixable:
            continue
        text = whole.replace("\r\n", "\n")
        ends = "\r\n" if text != whole else "\n"
        if text.replace("\n", ends) != whole or "\r" in text:
            continue  # lines that end in several ways: numbers of lines would not be sure
        edits: list[tuple[Finding, list[Edit]]] = []
        for finding in findings:
            if finding.where.path == path and finding.id in _FIXES and finding.where.line:
                changes = _FIXES[finding.id](text, finding.where.line, finding)
                if changes and not _overlaps(changes, [e for _, each in edits for e in each]):
                    edits.append((finding, changes))
        if not edits:
            continue
        after = _applied(text, [edit for _, each in edits for edit in each])
        if after != text and (not path.endswith(".py") or _tree(after) is not None):
            fixed.append(
                Fixed(
                    path=path,
                    before=whole,
                    after=after.replace("\n", ends),
                    findings=tuple(f for f, _ in edits),
                )
            )
    return fixed


def _overlaps(changes: Sequence[Edit], others: Sequence[Edit]) -> bool:
    return any(
        (one.start < other.end and other.start < one.end) or one == other
        for one in changes
        for other in others
    )


def _applied(text: str, edits: Sequence[Edit]) -> str:
    for edit in sorted(edits, key=lambda one: (one.start, one.end), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _line_span(text: str, line: int) -> tuple[int, int]:
    """Offsets of a line's first letter and of its end, the line break left out."""
    lines = text.split("\n")
    start = sum(len(each) + 1 for each in lines[: line - 1])
    return start, start + len(lines[line - 1]) if line <= len(lines) else start


def _replace_in_line(text: str, line: int, pattern: str, new: str) -> list[Edit]:
    """The one match of a pattern in a line, replaced; nothing when there are none or several."""
    start, end = _line_span(text, line)
    matches = list(re.finditer(pattern, text[start:end]))
    if len(matches) != 1:
        return []
    match = matches[0]
    return [Edit(start + match.start(), start + match.end(), match.expand(new))]


_Fix = Callable[[str, int, Finding], list[Edit]]


def _offset(text: str, line: int, column_bytes: int) -> int:
    """Offset of a node's place, which `ast` counts in bytes of UTF-8."""
    start, end = _line_span(text, line)
    return start + len(text[start:end].encode()[:column_bytes].decode(errors="ignore"))


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the file's own escapes and literals
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _fix_first(text: str, line: int, finding: Finding) -> list[Edit]:
    """The loop's new first line."""
    tree = _tree(text)
    loop = (
        next(
            (one for one in ast.walk(tree) if isinstance(one, ast.For) and one.lineno == line), None
        )
        if tree is not None
        else None
    )
    if finding.first is None or loop is None:
        return []
    decorators = getattr(loop.body[0], "decorator_list", [])
    first = min([loop.body[0].lineno, *(one.lineno for one in decorators)])
    start, _end = _line_span(text, first)
    indent = re.match(r"[ \t]*", text[start:])
    if first == loop.lineno or indent is None:
        return []
    return [Edit(start, start, f"{indent[0]}{finding.first}\n")]


def _fix_keyword(name: str) -> _Fix:
    """Turns a keyword argument that is True off in a call that starts or stands on the line."""

    def fix(text: str, line: int, _: Finding) -> list[Edit]:
        tree = _tree(text)
        for call in ast.walk(tree) if tree is not None else ():
            if isinstance(call, ast.Call) and call.lineno <= line <= (call.end_lineno or line):
                for given in call.keywords:
                    value = given.value
                    if (
                        given.arg == name
                        and isinstance(value, ast.Constant)
                        and value.value is True
                    ):
                        start = _offset(text, value.lineno, value.col_offset)
                        return [Edit(start, start + len("True"), "False")]
        return []

    return fix


def _fix_name(text: str, line: int, finding: Finding) -> list[Edit]:
    """The name that is read instead."""
    if finding.renames is None:
        return []
    old, new = finding.renames
    return _replace_in_line(text, line, rf"\b{old}\b", new)


_FIXES: Mapping[str, _Fix] = {
    "set-epoch-missing": _fix_first,
    "sampler-and-shuffle": _fix_keyword("shuffle"),
    "nccl-env-deprecated": _fix_name,
}
"""Failure -> its edit."""
