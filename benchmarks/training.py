"""Start whole training runs for the benchmarks, as a person would."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PROGRAMS = Path(__file__).parent / "programs"


def run_job(folder: Path, out: str, job: Mapping[str, Any], *options: str) -> Path:
    """The folder of a finished `paceline run`, with the programs beside its job file.

    Raises:
        SystemExit: It did not finish; its output and logs are printed.
    """
    shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(dict(job)))
    command = [sys.executable, "-m", "paceline", "run", "job.yaml", "--out", out, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        for log in sorted((folder / out / "logs").glob("*.log")):
            print(f"== {log.name}\n{log.read_text()[-4000:]}")
        raise SystemExit(f"{done.stdout}{done.stderr}\n{' '.join(command)}: {done.returncode}")
    return folder / out
