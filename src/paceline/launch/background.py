"""Start a run in the background, as `paceline run JOB &` with its output in a file."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.record.run import fresh_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A run that was started and goes on by itself."""

    run: str
    pid: int
    output: str


def start_in_background(job_file: Path, name: str, changes: Sequence[str], runs: Path) -> Started:
    """Start the job in a session of its own, which outlives this process."""
    runs.mkdir(parents=True, exist_ok=True)
    folder = fresh_name(runs, name)
    output = runs / f"{folder.name}.out"
    words = [word for change in changes for word in ("--set", change)]
    with output.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", str(job_file), "--out", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(run=str(folder), pid=process.pid, output=str(output))
