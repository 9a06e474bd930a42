"""Which checkpoint folders a path means: one, those of a run, or those in a folder."""

from pathlib import Path

from paceline.errors import JobError
from paceline.record.checkpoints import COMMIT, MANIFEST, list_checkpoints


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint folders that a path names, newest first.

    Args:
        path: A checkpoint folder, a folder of them, or a run's folder.

    Raises:
        JobError: There is nothing, or nothing of ours.
    """
    if is_checkpoint(path):
        return [path]
    below = path / "checkpoints"
    folder = below if below.is_dir() else path
    found = [entry.path for entry in list_checkpoints(folder)] if folder.is_dir() else []
    if found:
        return found
    what = f"there is {'no checkpoint' if path.is_dir() else 'nothing'} at {path}"
    if path.is_file():
        what = f"{path} is a file, and a checkpoint is a folder"
    raise JobError.of(
        code="C011",
        what=what,
        where="PATH",
        fix="give a run's folder, its checkpoints/ folder, or one step-N folder in it",
    )


def one_checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest that was committed.

    Raises:
        JobError: There is none.
    """
    found = checkpoints_at(path)
    return next((each for each in found if (each / COMMIT).exists()), found[0])


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is, or once was, one checkpoint."""
    return any((path / name).exists() for name in (MANIFEST, COMMIT, ".metadata"))
