"""The Python script that a run started, and the files beside it that it may import."""

import os
from pathlib import Path

from paceline.errors import PacelineError
from paceline.record.run import open_run
from paceline.record.source_files import read_sources

_MOST_FILES = 40
"""Files beside a script that are read. A guess: scripts seen import at most 15."""


def script_of_run(name: str, runs: Path) -> tuple[Path, bool] | None:
    """The first Python file of the run's command that is still there, and whether it was changed
    after the run's start; None where the name is no run of a script of one's own.

    Args:
        name: A run's id or folder.
    """
    folder = Path(name) if os.path.lexists(name) else runs / name
    if not (folder / "run.json").exists():
        return None
    try:
        run = open_run(folder)
        script = run.script()
        words = script.spec.command if script is not None else []
        paths = [script.folder / word for word in words if word.endswith(".py")] if script else []
        path = next((each for each in paths if each.is_file()), None)
        return None if path is None else (path, path.stat().st_mtime > run.info().created_at)
    except (PacelineError, OSError):
        return None


def read_script(path: Path) -> tuple[dict[str, bytes], str | None]:
    """The script and the Python files of its folder by name, and why the script was not read.

    Raises:
        JobError: There is no such file (`V020`).
    """
    beside = [each for each in sorted(path.parent.glob("*.py")) if each != path]
    sources = read_sources([path, *beside[:_MOST_FILES]], verb="diagnose --script")
    why_not = dict(sources.troubles).get(path.as_posix())
    return sources.files, why_not
