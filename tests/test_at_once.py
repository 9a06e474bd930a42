"""What `--at-once` shows of tests that pass, fail and end their process."""

import re
import subprocess
import sys
from pathlib import Path

FILES = {
    "test_kills.py": "import os, signal\n"
    "def test_before(): pass\n"
    "def test_kills_itself(): os.kill(os.getpid(), signal.SIGKILL)\n"
    "def test_after(): pass\n",
    "test_fails.py": "def test_fails(tmp_path): assert tmp_path.parent.name == 'none'\n",
    **{f"test_passes_{n}.py": "def test_passes(): pass\n" for n in range(3)},
}


def test_every_test_of_every_file_is_counted_also_when_a_process_dies(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    root = Path(__file__).parent.parent
    options = ("-p", "tests.conftest", "-c", root / "pyproject.toml", "--at-once", "1")
    words = [sys.executable, "-m", "pytest", "-q", *options, tmp_path]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"\b3 failed, 4 passed in ", done.stdout)
    assert done.stdout.count("the process of these tests ended with -9") >= 2
    assert "assert 'fork-0' == 'none'" in done.stdout
