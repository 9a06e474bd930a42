"""Standard output and error that break: a clear line, the right exit code, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-m", "paceline", "render", "--for", "list"]
WRONG = [sys.executable, "-m", "paceline", "render", "--for", "nothing"]

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@pytest.fixture(params=[None, "1"], ids=["buffered", "unbuffered"])
def environment(request):
    given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return given | ({"PYTHONUNBUFFERED": request.param} if request.param else {})


@pytest.mark.parametrize("command", [COMMAND, [*COMMAND, "--help"]], ids=["verb", "help"])
def test_a_full_disk_under_standard_output_is_said(command, environment):
    with FULL.open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 2
    said = done.stderr.decode()
    assert said.startswith("R002: standard output cannot be written: no space left")
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_a_reader_that_has_seen_enough_is_no_failure(environment):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(COMMAND, stdout=writing, stderr=subprocess.PIPE, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("command", "text", "code"),
    [
        (["adapt", "--to", "ddp"], "import tensorflow\ntensorflow.foo()\n", 2),
        (["diagnose"], "frobnicator: fatal: cannot open gate\n", 1),
        (["lint"], "def (\n", 2),
    ],
)
def test_what_a_verb_answers_is_its_exit_code_also_where_the_reader_leaves(
    command, text, code, tmp_path
):
    path = tmp_path / "it.py"
    path.write_text(text)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "paceline", *command, path], stdout=writing)
    os.close(writing)
    assert done.returncode == code


def test_a_refusal_keeps_its_exit_code_where_nobody_can_be_told(environment):
    with FULL.open("w") as full:
        done = subprocess.run(WRONG, stdout=subprocess.PIPE, stderr=full, env=environment)
    assert (done.returncode, done.stdout) == (2, b"")


def test_standard_output_that_is_closed_is_nothing_to_write_to(environment):
    shell = ["sh", "-c", '"$@" >&-', "sh", *COMMAND]
    done = subprocess.run(shell, stderr=subprocess.PIPE, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
