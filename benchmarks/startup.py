"""How long the command line takes to answer: whole processes, wall time.

.venv/bin/python benchmarks/startup.py [n]
"""

import subprocess
import sys
import time
from pathlib import Path

from figures import machine, spread

COMMANDS = {
    "paceline --help": ["--help"],
    "paceline plan examples/tiny-lm/job.yaml": ["plan", "examples/tiny-lm/job.yaml"],
}


def main() -> None:
    """Run the commands in turn, n times after one warm-up, and print the spread of each."""
    num_runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    root = Path(__file__).parent.parent
    paceline = str(Path(sys.executable).parent / "paceline")
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for run in range(num_runs + 1):
        for name, arguments in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([paceline, *arguments], cwd=root, check=True, capture_output=True)
            if run:
                taken[name].append(time.perf_counter() - start)
    print(f"measured; {machine()}")
    for name, seconds in taken.items():
        print(f"{name}: {spread(seconds)}")


if __name__ == "__main__":
    main()
