"""Cases of lint: files whose lines say what is to be found there.

`#! id id` or `//! id` at a line's end says the ids; `#? {json}` on its own line is the context.
Both are taken out before the file is read, so that the lines keep their numbers.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint
from paceline.check.lint.stated import context_from_facts

CASES = Path(__file__).parent / "cases"
_MARK = re.compile(r"[ \t]*(?:#|//)! ([a-z0-9 -]+)$", re.M)
_CONTEXT = re.compile(r"^(?:#|//)\? (\{.*\})$", re.M)


@dataclass(frozen=True)
class Case:
    path: Path
    text: str
    wanted: frozenset[tuple[str, int]]
    context: Context


def read_case(path: Path) -> Case:
    """One case, its marks taken out."""
    raw = path.read_text()
    wanted = {
        (name, number)
        for number, line in enumerate(raw.split("\n"), start=1)
        for mark in _MARK.findall(line)
        for name in mark.split()
    }
    facts = _CONTEXT.search(raw)
    context = context_from_facts(json.loads(facts[1])) if facts else Context()
    return Case(path, _MARK.sub("", _CONTEXT.sub("", raw)), frozenset(wanted), context)


def cases_in(folder: str) -> list[Case]:
    """The cases of `planted` or `correct`."""
    return [read_case(path) for path in sorted((CASES / folder).iterdir()) if path.is_file()]


def lint_program(path: str, source: str | bytes, context: Context) -> list[Finding]:
    """Findings in one program alone."""
    return lint({path: source.encode() if isinstance(source, str) else source}, context)
