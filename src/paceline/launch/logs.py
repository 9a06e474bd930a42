"""The logs in a run's folder, as they are and as they grow."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.errors import JobError
from paceline.record.run import RunFolder
from paceline.record.run_row import read_row
from paceline.record.sanitize import plain

_LOOK_S = 0.5
_OVER_EVERY_S = 3.0
"""Between two looks whether the run is over. A guess: it reads the record."""

_TAIL_BYTES = 1 << 20
"""Bytes of a log that are read for its last lines. A guess: some thousand lines."""

_WAITS = ("running", "new")
"""States of a run whose logs may still grow."""


def print_logs(
    run: RunFolder, *, rank: int | None, tail: int, follow: bool, write: Callable[[str], None]
) -> None:
    """Write the last lines of each log, and then what comes.

    Args:
        rank: Only this one's; None is every log, with its name before each line.
        tail: Lines of each; 0 is all.
        follow: Until the run is over.

    Raises:
        JobError: `W017`, there is no such log (yet).
    """
    reading: dict[Path, _Tail] = {}
    looked_s = time.monotonic()
    while True:
        for path in _logs(run, rank):
            fresh = path not in reading
            lines = reading.setdefault(path, _Tail(path)).lines()
            for line in lines[-tail:] if fresh and tail else lines:
                shown = plain(line)
                write(shown if rank is not None else f"{path.stem}: {shown}")
        if not follow:
            break
        now_s = time.monotonic()
        if now_s - looked_s > _OVER_EVERY_S:
            looked_s = now_s
            if read_row(run.path).state not in _WAITS:
                follow = False  # once more, for what came meanwhile
                continue
        time.sleep(_LOOK_S)
    if not reading:
        raise _no_log(run, rank)


def last_lines(run: RunFolder, *, rank: int | None, tail: int) -> list[tuple[str, list[str]]]:
    """The last lines of each log, by its name, as a terminal would leave them: of a progress bar
    its last state. Links are not followed.

    Raises:
        JobError: `W017`, there is no such log (yet).
    """
    paths = [path for path in _logs(run, rank) if path.is_file() and not path.is_symlink()]
    if not paths:
        raise _no_log(run, rank)
    return [(path.stem, _lines_of(path, tail)) for path in paths]


def _lines_of(path: Path, tail: int) -> list[str]:
    lines = _end_of(path).removesuffix("\n").split("\n")[-tail:]
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def _end_of(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        if size > _TAIL_BYTES:
            file.readline()  # its beginning is not there
        return file.read(_TAIL_BYTES).decode("utf-8", "replace")


def _no_log(run: RunFolder, rank: int | None) -> JobError:
    return JobError.of(
        code="W017",
        what=f"there is no log of {f'rank {rank}' if rank is not None else 'this run'}",
        where=str(run.logs),
        fix="see whether it has started: paceline status; ranks count from 0",
    )


def _logs(run: RunFolder, rank: int | None) -> Iterator[Path]:
    if rank is not None:
        path = run.rank_log(rank)
        if path.exists():
            yield path
        return
    yield from sorted(run.logs.glob("*.log"))


class Growing:
    """A file that grows: what was not read before."""

    def __init__(self, path: Path, *, at: int = 0) -> None:
        self._path = path
        self._begins = self._at = at

    def more(self) -> bytes:
        """What has come since the last time; nothing where the file is gone."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                content = file.read()
        except OSError:
            return b""
        self._at += len(content)
        return content

    def end(self, num_bytes: int) -> str:
        """The end of what there is from the byte that it began with, read before or not."""
        try:
            with self._path.open("rb") as file:
                file.seek(max(self._begins, self._path.stat().st_size - num_bytes))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


class _Tail:
    """The whole lines of a file that were not read before."""

    def __init__(self, path: Path) -> None:
        self._file = Growing(path)
        self._torn = b""

    def lines(self) -> list[str]:
        *whole, self._torn = (self._torn + self._file.more()).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]
