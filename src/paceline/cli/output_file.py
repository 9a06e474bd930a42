"""Files that a command is asked to write, looked at before its work and not after it."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import JobError


def check_can_write(path: Path | None, option: str) -> None:
    """Nothing when the file can be written, or none is asked for.

    Args:
        path: Where the file will be.
        option: The option that asks for it, such as `--plot`.

    Raises:
        JobError: Its folder is missing, it is a folder itself, or the system refuses (`R002`).
    """
    if path is None:
        return
    was_there = path.exists()
    try:
        with path.open("a"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise JobError.of(
            code="R002",
            what=f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
            where=option,
            fix="name a file in a folder that exists and that you may write to",
        ) from None


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write a file that is not there yet.

    Raises:
        JobError: `T014`, it is there, or it cannot be written.
    """
    if str(path) == "-":
        what, fix = "- is not the name of a file", "name the file to write"
    elif path.exists() and not force:
        what, fix = f"{path} exists", "give another name, or --force to write over it"
    else:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            what = f"{path} cannot be written: {error.strerror}"
            fix = "give a file in a folder that exists and that you may write to"
        else:
            return
    raise JobError.of(code="T014", what=what, where="--write", fix=fix)


@contextmanager
def kept_folder(keep: Path | None, name: str) -> Iterator[Path]:
    """The empty folder of `--keep`, or one for a command of this name that is removed at the end.

    Raises:
        JobError: `R002`, it cannot be written, or has files already.
    """
    try:
        if keep is None:
            temporary = tempfile.TemporaryDirectory(prefix=f"paceline-{name}-")
        else:
            keep.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=keep):
                pass
            if any(keep.iterdir()):
                raise FileExistsError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    except OSError as error:
        raise JobError.of(
            code="R002",
            what=f"{keep or 'the folder for temporary files'} cannot be used: "
            f"{(error.strerror or str(error)).lower()}",
            where="TMPDIR" if keep is None else "--keep",
            fix="name a new or empty folder that you may write to",
        ) from None
    if keep is not None:
        yield keep.absolute()
        return
    with temporary as made:
        yield Path(made)
