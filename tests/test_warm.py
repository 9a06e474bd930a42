"""Which tests fork what imports torch (`warm/warm.py`), and which start it as people do."""

import subprocess
import sys

import pytest
from tests.warm.sitecustomize import PROGRAMS


def _finds_warm() -> bool:
    done = subprocess.run([sys.executable, "-c", "import warm"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks elsewhere are no test of Linux")
def test_a_program_of_a_test_is_a_fork():
    assert _finds_warm()


@pytest.mark.repeat
def test_a_program_of_a_test_that_repeats_others_is_started():
    assert not _finds_warm()


@pytest.mark.repeat
@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.startswith("paceline.")])
def test_a_program_imports_what_it_needs_where_nothing_was_imported(program: str):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import {program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
