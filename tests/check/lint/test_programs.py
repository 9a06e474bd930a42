"""Whole programs as authors write them: each planted fault is found, a correct one is left alone.

`programs/bad_*.py` say in a comment `# expect: id` on the line where a finding belongs;
`programs/clean_*.py` may get no finding of warning or above.
"""

import re
from pathlib import Path

import pytest
from tests.check.lint.marked_cases import lint_program

from paceline.check.finding import Severity
from paceline.check.lint.context import Context

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
EXPECT = re.compile(r"# expect: ([\w-]+)")


def expected(text: str) -> set[tuple[str, int]]:
    return {
        (name, number)
        for number, line in enumerate(text.split("\n"), start=1)
        for name in EXPECT.findall(line)
    }


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_gets_the_findings_that_were_planted_and_no_other(path):
    text = path.read_text(encoding="utf-8")
    findings = lint_program(path.name, text, Context())
    found = {(one.id, one.where.line) for one in findings}
    wanted = expected(text)
    assert wanted <= found
    loud = {(one.id, one.where.line) for one in findings if one.severity is not Severity.INFO}
    assert loud - wanted == set()
    assert bool(wanted) is path.stem.startswith("bad_")


def test_there_are_programs_of_both_kinds():
    kinds = [path.stem.split("_")[0] for path in PROGRAMS]
    assert kinds.count("bad") >= 60
    assert kinds.count("clean") >= 30
