"""Which checkpoint folders a path means: one, those of a run, or those in a folder."""

from pathlib import Path

from paceline.errors import JobError
from paceline.record.checkpoints import COMMIT, MANIFEST, list_checkpoints
from paceline.record.tensors import TENSORS


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
        what = f"{path} is a file, and a run's checkpoint is a folder"
    raise JobError.of(
        code="C011",
        what=what,
        where=str(path),
        fix="give a run's folder, its checkpoints/ folder, one step-N folder in it, or a folder or "
        "file of weights",
    )


def one_checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest that was committed.

    Raises:
        JobError: There is none.
    """
    found = checkpoints_at(path)
    return next((each for each in found if (each / COMMIT).exists()), found[0])


def checkpoint_of_run(run: Path, *, step: int | None = None, best: bool = False) -> Path:
    """One committed checkpoint of a run: the newest, that of a step, or the one with the lowest
    evaluation loss.

    Raises:
        JobError: `C011`, there is none.
    """
    entries = [entry for entry in list_checkpoints(run / "checkpoints") if entry.is_complete]
    kept = ", ".join(str(entry.step) for entry in reversed(entries)) or "none"
    if step is not None:
        entries = [entry for entry in entries if entry.step == step]
    if best:
        entries = [entry for entry in entries if entry.held_out_loss is not None]
        entries.sort(key=lambda entry: entry.held_out_loss or 0.0)
    if entries:
        return entries[0].path
    lacks = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if best and kept != "none":
        lacks = "no checkpoint with an evaluation loss"
    raise JobError.of(
        code="C011",
        what=f"{run} has {lacks}; complete ones are of steps: {kept}",
        where=str(run / "checkpoints"),
        fix="give the step of one that is there, or leave --step and --best out for the newest; "
        "checkpoint.keep_every keeps more of them",
    )


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is, or once was, one checkpoint."""
    return any((path / name).exists() for name in (MANIFEST, COMMIT, ".metadata"))


def is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint that Paceline wrote, or began to write."""
    return any((path / name).exists() for name in (MANIFEST, COMMIT, TENSORS))
