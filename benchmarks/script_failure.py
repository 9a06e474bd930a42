"""How long after a script's exception its text is on the screen, and how often it is started.

    .venv/bin/python benchmarks/script_failure.py [repeats]

Two ranks of a script that cannot be parsed, one whose rank 1 raises, and one whose rank 1 raises
after torch is imported and the ranks have met. The screen is a pipe that is read line by line. The
clock starts when the exception is raised (for the syntax error, which is raised in no script's
line, when the screen shows that the processes were started) and stops when the line that names it
is read. Goals: below 2 s, no second start. Exits with 1 where a goal is missed.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import machine

GOAL_S = 2.0

RAISES = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    open("raised", "w").write(str(time.time()))
    raise ValueError("planted")
time.sleep(600)
"""
MEETS = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 1:
    open("raised", "w").write(str(time.time()))
    raise ValueError("planted")
dist.all_reduce(x)
"""
SCRIPTS = {
    "syntax error": ("planted = = 3\n", "SyntaxError"),
    "rank 1 raises": (RAISES, "ValueError: planted"),
    "rank 1 raises, the other waits in a collective": (MEETS, "ValueError: planted"),
}


def main() -> None:
    """Print a row a script."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    print(machine())
    is_met = True
    for name, (text, words) in SCRIPTS.items():
        found = [once(text, words) for _ in range(repeats)]
        seconds = [each[0] for each in found]
        starts = max(each[1] for each in found)
        is_met &= max(seconds) < GOAL_S and starts == 2
        print(
            f"{name:<48} median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s, "
            f"{starts} processes started"
        )
    sys.exit(not is_met)


def once(text: str, words: str) -> tuple[float, int]:
    """Seconds from the exception to its line on the screen, and processes that were started."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "train.py").write_text(text)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "paceline", "run", "--script", "train.py"),
                *("--nproc", "2", "--out", "run", "--no-report"),
            ],
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        began, seen, lines = 0.0, None, []
        for line in process.stdout:
            lines.append(line)
            if "is process" in line:
                began = time.time()
            if seen is None and words in line:
                seen = time.time()
        process.wait()
        assert seen is not None, "".join(lines)
        raised = place / "raised"
        start = float(raised.read_text()) if raised.exists() else began
        starts = sum(bool(re.search(r"rank \d is process", line)) for line in lines)
        return seen - start, starts


if __name__ == "__main__":
    main()
