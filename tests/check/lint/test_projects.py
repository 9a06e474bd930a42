"""Programs of several files, with what starts them: linted together, a folder each.

Lines say `# expect: id` as in `programs/`; `clean_*` folders get no finding of warning or above.
"""

from pathlib import Path

import pytest
from tests.check.lint.test_programs import expected

from paceline.check.finding import Severity
from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint

PROJECTS = sorted((Path(__file__).parent / "projects").iterdir())


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_a_program_of_several_files_gets_the_findings_that_were_planted_and_no_other(folder):
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.*"))}
    findings = lint({name: text.encode() for name, text in texts.items()}, Context())
    found = {(one.id, one.where.path, one.where.line) for one in findings}
    wanted = {(id, name, line) for name, text in texts.items() for id, line in expected(text)}
    assert wanted <= found
    loud = [one for one in findings if one.severity is not Severity.INFO]
    assert {(one.id, one.where.path, one.where.line) for one in loud} - wanted == set()
    assert bool(wanted) is folder.name.startswith("bad_")
