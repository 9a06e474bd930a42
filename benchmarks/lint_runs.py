"""One run of `paceline lint` in a process of its own, with limits.

Levels are those that the rules show: what the catalogue's rows cut off is added by `capped`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNCAPPED = """
from dataclasses import replace
from paceline.catalog import failure
rows = {id: replace(row, lint=row.lint and "error") for id, row in failure.load_failures().items()}
failure.load_failures = lambda: rows
from paceline.cli import main
main()
"""
"""Lint with every level as the rule shows it, whatever the catalogue's row allows at most."""

COMMAND = (sys.executable, "-c", UNCAPPED, "lint", ".", "--json", "--no-cache")


@dataclass(slots=True)
class Linted:
    """What one run of lint gave."""

    findings: Sequence[Mapping[str, Any]] = ()
    """As `--json` prints them."""

    files: int = 0
    unread: Sequence[str] = ()
    """Files that could not be read as what they are."""

    seconds: float = 0.0
    trouble: str = ""
    """Why there are no findings, if that is no answer."""


def lint_folder(folder: Path, seconds: int = 600, memory_gb: float = 8) -> Linted:
    """Lint a folder as a whole; past its limits the run is ended and says so."""
    started = time.perf_counter()
    with subprocess.Popen(
        ("sh", "-c", 'ulimit -v "$0" && exec "$@"', str(int(memory_gb * 1e6)), *COMMAND),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Linted(seconds=float(seconds), trouble=f"ended after {seconds} s")
    took = time.perf_counter() - started
    if not output:
        return Linted(seconds=took, trouble=f"no answer, exit code {process.returncode}")
    data = json.loads(output)
    return Linted(
        findings=data["findings"],
        files=len(data["files"]),
        unread=[one["path"] for one in data["unread"]],
        seconds=took,
    )
