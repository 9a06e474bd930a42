"""SARIF as Microsoft's own validator reads it: against the schema, and the rules of code hosts."""

import json
import os
import shutil
import subprocess

import pytest
from tests.check.lint.marked_cases import cases_in

from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint_files
from paceline.check.lint.sarif import sarif

VALIDATOR = shutil.which("Sarif.Multitool") or shutil.which("sarif-multitool")


@pytest.mark.skipif(
    VALIDATOR is None, reason="npm install --global @microsoft/sarif-multitool-linux"
)
def test_the_validator_has_no_word_against_any_finding(tmp_path):
    files = {one.path.name: one.text.encode() for one in cases_in("planted")}
    broken = {"broken.py": b"def f(:", "a b.py": b"import torch  # paceline: ignore[x] no reason"}
    linted = lint_files({**files, **broken}, Context())
    log = sarif(linted.findings, linted.answered, linted.unread)
    (tmp_path / "log.sarif").write_text(json.dumps(log))
    said = subprocess.run(
        [str(VALIDATOR), "validate", "log.sarif", "--rule-kind", "Sarif;Ghas"],
        cwd=tmp_path,
        env={**os.environ, "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    words = [one for one in said.splitlines() if ": error " in one or ": warning " in one]
    assert [one for one in words if "SARIF2005" not in one] == []  # the project has no address yet
    assert "Analysis completed successfully." in said
