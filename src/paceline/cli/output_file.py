"""Files that a command is asked to write, looked at before its work and not after it."""

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
    if path.exists() and not force:
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
