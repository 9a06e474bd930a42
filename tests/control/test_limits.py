"""What an agent's workers may open."""

import resource
import subprocess
import sys

import pytest

from paceline.control.limits import ENOUGH_FILES, open_files_of_workers


@pytest.mark.parametrize(
    ("soft", "hard", "found"),
    [
        (1024, 4096, 4096),
        (1024, 2**20, ENOUGH_FILES),
        (1024, None, ENOUGH_FILES),
        (2**20, 2**20, 2**20),
        (None, None, None),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_is_allowed_and_never_lowered(soft, hard, found):
    assert open_files_of_workers(soft, hard) == found


PROGRAM = """
import subprocess
from paceline.control.limits import raise_open_files
raise_open_files()
subprocess.run("ulimit -n", shell=True)
"""


def test_children_of_an_agent_have_what_it_raised():
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200)),
    )
    assert told.stdout.split() == ["200"]
