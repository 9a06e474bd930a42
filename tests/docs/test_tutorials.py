"""docs/tutorials: each page is followed from top to bottom, and shows what it says one sees.

A block whose first line is `# NAME` is a file to write; a `sh` block is run as it stands; a `text`
block behind it is what it prints. Its lines are found in that order; digits, bars, folders
and hashes (they depend on the processor) differ, and a line `...` stands for any others.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml|jsonl|sh|sbatch))\n")
MAX_LINES = 120


@pytest.mark.ranks
@pytest.mark.repeat  # what a page does is tested where it is built
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_works_from_top_to_bottom(page: Path, tmp_path: Path):
    output = ""
    for language, text in BLOCK.findall(page.read_text()):
        if language == "text":
            assert list(missing_lines(text, output)) == [], output
        elif named := FILE.match(text):
            (tmp_path / named[1]).write_text(text)
        else:
            assert language == "sh", f"a block of {language} that is neither a file nor run"
            output = run(text, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_short(page: Path):
    assert len(page.read_text().splitlines()) <= MAX_LINES


def test_a_changed_line_of_a_tutorial_is_found():
    seen = "step 3  loss 2.31\nfinished\n"
    assert list(missing_lines("step 9  loss 1.05\n...\nfinished\n", seen)) == []
    assert list(missing_lines("finished\nstep 9  loss 1.05\n", seen)) == ["step 0 loss 0"]
    assert list(missing_lines("equal: 23acf0dbe13fdc14\n", "equal: 92947a881e8eb4f5\n")) == []


def run(script: str, folder: Path) -> str:
    """What a block prints; `# exit code N` on its last line is what it ends with."""
    code = re.search(r"# exit code (\d+)", script)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=folder,
        env=environment | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == int(code[1] if code else 0), done.stdout
    return done.stdout


def missing_lines(shown: str, printed: str) -> Iterator[str]:
    """Lines of a page that the command does not print, or not in that order."""
    lines = iter([pattern(line) for line in re.split(r"[\n\r]", printed)])
    for line in shown.splitlines():
        wanted = pattern(line)
        if wanted not in ("", "...") and not any(wanted in line for line in lines):
            yield wanted


def pattern(line: str) -> str:
    """The line without what differs from run to run: numbers, units, bars, dates, folders, hash."""
    line = re.sub(r"\b[0-9a-f]{16,64}\b", "HASH", line)
    line = re.sub(r"\S*/(runs/[\w-]+?)-\d{8}-\d{6}", r"\1", line)
    line = re.sub(r"\b\d[\d,.:]*\s?(KiB|MiB|GiB|[KMG]?B|ms|[smhd]|us|K|M)?\b", "0", line)
    line = re.sub(r"(?:0[ ,])+0|#+", "0", line)
    return re.sub(r"\s+", " ", line).strip()
