"""Finds the logs that are meant, and reads them block by block: files, folders, runs, input."""

import gzip
import os
import re
import select
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import JobError

_BLOCK_BYTES = 1 << 20
"""Read at once. A guess: large enough that calls cost nothing, small beside memory."""

MAX_FILES = 100_000
"""Files of one folder that are read: more ranks than any job has had."""

_PATIENCE_S = 1.0
"""How long a pipe may be silent before it is said that it is waited for. A guess: a person wonders
after a second or two."""

_ENDINGS = {".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".json", ".gz", ""}
_NO_LOGS = {"job.yaml", "plan.json", "run.json", "control.json", "requirements.txt", "config.json"}
_FIX = "give a log file, a folder of logs, a run's id, - for standard input, or words in quotes"
_RANK = re.compile(r"(?:^|[-_./])(?:global_)?rank[-_.=]?(\d+)(?=\D|$)")
_FOLDER_RANK = re.compile(r"(?:^|/)attempt_\d+/(\d+)/|/(\d+)/std(?:out|err)(?:\.log)?$")
_HOST = re.compile(r"(?:^|[-_./])((?:node|host|worker|gpu)[-_]?\d+)(?=\D|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One log to read."""

    name: str
    blocks: Iterable[bytes]
    rank: int | None = None
    host: str | None = None
    is_words: bool = False
    """Whether it is what a person typed, and no file."""


def find_logs(names: Iterable[str], runs: Path) -> list[Log]:
    """Every log that the names mean, as yet unread.

    Args:
        names: Files, folders, ids or folders of runs; `-` is standard input; a sentence is itself.

    Raises:
        JobError: `V010`, a name leads nowhere.
    """
    found: list[Log] = []
    for name in names:
        if not name.strip():
            raise JobError.of(
                code="V010",
                what="an argument is empty, as a variable of the shell is that is not set",
                where="LOG",
                fix=_FIX,
            )
        if name == "-":
            found.append(Log(name="-", blocks=_blocks_of_input()))
            continue
        path = Path(name)
        if _is_sentence(name):
            found.append(Log(name="words", blocks=[name.encode()], is_words=True))
            continue
        if not os.path.lexists(path) and os.path.isdir(runs / name):
            path = runs / name
        _check_can_be_read(path, name)
        if path.is_dir():
            is_run = (path / "run.json").exists()
            closed: list[OSError] = []
            files = list(_files(path / "logs" if is_run else path, closed))
            if is_run and (path / "events.jsonl").exists():
                files.append(path / "events.jsonl")
            found += [Log(name=str(each.filename), blocks=_failing(each)) for each in closed]
            if not files and not closed:
                raise JobError.of(
                    code="V010",
                    what=f"there is no log in {path}",
                    where=name,
                    fix="name the files themselves, or a folder of *.log, *.out, *.txt",
                )
            found += [_log(file, path) for file in files]
        else:
            found.append(_log(path, path.parent))
    return found


def _is_sentence(name: str) -> bool:
    """Whether a name is a sentence ("tokens/s fall after a day") and not a path."""
    if " " not in name or os.path.lexists(name) or name.startswith(("/", ".", "~")):
        return False
    return "/" not in name or not (Path(name).suffix or Path(name).parent.exists())


def _log(path: Path, root: Path) -> Log:
    inside = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    rank = _RANK.search(inside) or _FOLDER_RANK.search(f"/{inside}")
    host = _HOST.search(inside)
    number = next((each for each in rank.groups() if each), None) if rank else None
    return Log(
        name=str(path),
        blocks=_blocks(path),
        rank=int(number) if number is not None else None,
        host=host[1] if host else None,
    )


def _check_can_be_read(path: Path, name: str) -> None:
    """Refuse what cannot be read. A pipe is not opened: whoever writes to it would see it close."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            os.scandir(path).close()
            (path / "run.json").exists()
        elif stat.S_ISREG(mode):
            path.open("rb").close()
    except OSError as error:
        raise JobError.of(
            code="V010",
            what=f"{name} cannot be read: {error.strerror}",
            where=name,
            fix=_FIX,
        ) from None
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise JobError.of(
            code="V010",
            what=f"{name} is neither a file nor a folder",
            where=name,
            fix=_FIX,
        )


def _failing(error: OSError) -> Iterator[bytes]:
    """What a folder gives that cannot be opened: the reader of logs says why."""
    yield from ()
    raise error


def _files(folder: Path, closed: list[OSError]) -> Iterator[Path]:
    """Files that may be logs, by name; links to folders are not followed, so no loop is.

    Folders that cannot be opened are added to `closed`.
    """
    count = 0
    for base, folders, names in os.walk(folder, onerror=closed.append, followlinks=False):
        folders[:] = sorted(each for each in folders if not each.startswith((".", "checkpoint")))
        for name in sorted(names, key=natural):
            path = Path(base) / name
            is_log = Path(name).suffix in _ENDINGS or re.search(
                r"\.(o|e)?\d+$|rank|log|nccl_trace", name
            )
            if name.startswith(".") or name in _NO_LOGS or not is_log or not _is_file(path):
                continue
            if path.suffix == ".json" and not re.search(r"trace|flight|dump", name):
                continue
            count += 1
            if count > MAX_FILES:
                return
            yield path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except PermissionError:  # a folder whose names alone can be read: the reader says so
        return True


def natural(name: str) -> list[tuple[int, str]]:
    """Key to sort names by, in which the numbers in them count."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _blocks(path: Path) -> Iterator[bytes]:
    if stat.S_ISFIFO(path.stat().st_mode):
        yield from _blocks_of_pipe(path)
        return
    with path.open("rb") as file:
        start = file.read(2)
        file.seek(0)
        if start == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                while piece := unpacked.read1(_BLOCK_BYTES):
                    yield piece
        else:
            yield from _pieces(file)


def _blocks_of_pipe(path: Path) -> Iterator[bytes]:
    """What is written to a named pipe; to open it as usual would wait without a word."""
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(pipe, "rb") as file:
        arrived = select.poll()
        arrived.register(pipe, select.POLLIN)
        if not arrived.poll(_PATIENCE_S * 1000):
            print(f"{path} is a pipe; waiting until something writes to it", file=sys.stderr)
            arrived.poll()
        os.set_blocking(pipe, True)
        yield from _pieces(file)


def _blocks_of_input() -> Iterator[bytes]:
    if sys.stdin.isatty():
        print("reading standard input; end with Ctrl-D", file=sys.stderr)
    yield from _pieces(sys.stdin.buffer)


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(_BLOCK_BYTES):
        yield piece
