"""Fixes that need no judgement, as changed texts: one small edit for each finding it knows.

A fix that does not apply exactly is left out: the finding then stays for the reader. A changed
Python file that no longer parses is left as it was.
"""

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.check.finding import Finding
from paceline.check.lint.facts.source import Unreadable, tree_of


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
    wanted = {path: [one for one in findings if one.where.path == path] for path in texts}
    fixed = (_fix_file(path, whole, wanted[path]) for path, whole in texts.items())
    return [one for one in fixed if one is not None]


def _fix_file(path: str, whole: str, findings: Sequence[Finding]) -> Fixed | None:
    known = [one for one in findings if one.id in _FIXES and one.where.line]
    text = whole.replace("\r\n", "\n")
    ends = "\r\n" if text != whole else "\n"
    if not known or text.replace("\n", ends) != whole or "\r" in text:
        return None  # nothing to do, or lines that end in several ways: numbers would not be sure
    lines, tree = text.split("\n"), _tree(text) if path.endswith(".py") else None
    done = []
    for finding in known:
        for line, pattern, new in _FIXES[finding.id](finding, tree):
            changed, number = re.subn(pattern, new, "".join(lines[line - 1 : line]), flags=re.M)
            if number == 1:
                lines[line - 1] = changed  # also where it is two lines now: the others keep theirs
                done.append(finding)
    after = "\n".join(lines)
    if not done or (path.endswith(".py") and _tree(after) is None):
        return None
    return Fixed(path=path, before=whole, after=after.replace("\n", ends), findings=tuple(done))


def _tree(text: str) -> ast.Module | None:
    with suppress(Unreadable):
        return tree_of(text)
    return None


Edit = tuple[int, str, str]
"""A line, a pattern that it has once, and what is written in its place."""


def _fix_first(finding: Finding, tree: ast.Module | None) -> Iterator[Edit]:
    """The loop's new first line."""
    for loop in ast.walk(tree) if tree is not None and finding.first is not None else ():
        if isinstance(loop, ast.For) and loop.lineno == finding.where.line:
            decorators = getattr(loop.body[0], "decorator_list", [])
            first = min(one.lineno for one in (loop.body[0], *decorators))
            if first != loop.lineno:
                new = str(finding.first).replace("\\", r"\\")
                yield first, r"\A([ \t]*)", rf"\1{new}\n\1"
            return


def _fix_shuffle(finding: Finding, tree: ast.Module | None) -> Iterator[Edit]:
    """shuffle=True turned off in a call that starts or stands on the line."""
    line = finding.where.line or 0
    for call in ast.walk(tree) if tree is not None else ():
        if isinstance(call, ast.Call) and call.lineno <= line <= (call.end_lineno or line):
            for given in call.keywords:
                if given.arg == "shuffle" and ast.unparse(given.value) == "True":
                    yield given.value.lineno, r"\b(shuffle\s*=\s*)True\b", r"\1False"
                    return


def _fix_name(finding: Finding, tree: ast.Module | None) -> Iterator[Edit]:
    """The name that is read instead."""
    if finding.renames is not None:
        old, new = finding.renames
        yield finding.where.line or 0, rf"\b{old}\b", new


_FIXES: Mapping[str, Callable[[Finding, ast.Module | None], Iterator[Edit]]] = {
    "set-epoch-missing": _fix_first,
    "sampler-and-shuffle": _fix_shuffle,
    "nccl-env-deprecated": _fix_name,
}
"""Failure -> its edit."""
