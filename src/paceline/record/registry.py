"""The runs of a folder as rows: fast over thousands, and never wrong for it.

The run folders are the truth. Rows are kept in an SQLite file in the user's cache folder, which may
be thrown away at any time: a row is read again when a file of its run has changed, and all of them
when the index cannot be used. It is never beside the runs, because SQLite's locks do not hold on
every shared file system.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.errors import JobError
from paceline.record import history, run_files, run_row
from paceline.record.run_files import NAMES
from paceline.record.run_row import RunRow, read_files, standing_now
from paceline.record.user_cache import sweep, user_cache

if TYPE_CHECKING:
    import sqlite3

_WAIT_S = 1.0
"""For another process that writes the index; then this one goes without. A guess."""

_TABLE = "create table if not exists run(folder text primary key, stamp text, row text, job text)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The runs of a folder."""

    rows: list[RunRow]
    """Oldest first."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name of a run's folder -> settings of its job by dotted name, where they were asked for."""

    note: str | None = None
    """Why the next listing will be no faster than this one."""


def list_runs(runs: Path, *, settings: bool = False, cache: Path | None = None) -> Listing:
    """Every run directly below a folder, as it is now.

    Args:
        cache: Folder of the index; None is the user's cache folder.
    """
    runs = Path(os.path.realpath(runs))
    stamps = dict(_stamps(runs))
    index = _Index(runs, cache)
    kept = index.read(settings) if stamps else {}
    found = {
        name: kept[name]
        for name, stamp in stamps.items()
        if name in kept and kept[name].stamp == stamp
    }
    fresh = {name: _read(runs / name, stamp) for name, stamp in stamps.items() if name not in found}
    if fresh or kept.keys() - stamps.keys():
        index.write(fresh, kept.keys() - stamps.keys())
    now_s = time.time()
    rows = [standing_now(entry.row, now_s) for entry in (found | fresh).values()]
    return Listing(
        rows=sorted(rows, key=lambda row: (row.created_at, row.run)),
        settings={name: one.settings for name, one in (found | fresh).items()} if settings else {},
        note=index.note,
    )


def run_folder(named: str, runs: Path) -> Path:
    """A run's folder by its path, its name in the folder of all runs, or a queue's id of it.

    Raises:
        JobError: `W015`, there is no such run.
    """
    for path in (Path(named), runs / named):
        with contextlib.suppress(OSError, ValueError):  # too long for a name, or not to be seen
            if (path / "run.json").exists():
                return path.resolve()
    if _JOB_ID.fullmatch(named):
        for row in reversed(list_runs(runs).rows):
            if row.job_id == named:
                return Path(row.folder)
    raise JobError.of(
        code="W015",
        what=f"{named!r} is neither a run's folder nor a queue's id of a run in {runs}",
        where="RUN",
        fix="`paceline runs` lists the runs; name their folder with --runs",
    )


_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")


@dataclass(frozen=True, slots=True)
class _Entry:
    stamp: str
    row: RunRow
    settings: Mapping[str, Any]


def _read(folder: Path, stamp: str) -> _Entry:
    return _Entry(stamp, *read_files(folder))


def _stamps(runs: Path) -> Iterator[tuple[str, str]]:
    """Name of each run -> what changes with every change of a file that its row is made from."""
    try:
        names = os.listdir(runs)
    except OSError:
        return
    for name in names:
        folder = f"{runs}/{name}/"
        parts = []
        for file in NAMES:
            try:
                stat = os.stat(folder + file)
            except OSError:
                if file == "run.json":
                    break
                parts.append("-")
            else:
                parts.append(f"{stat.st_mtime_ns}.{stat.st_ctime_ns}.{stat.st_size}.{stat.st_ino}")
        else:
            yield name, " ".join(parts)


class _Index:
    """The kept rows of one folder of runs. Whatever fails makes it empty, and says so in `note`."""

    def __init__(self, runs: Path, cache: Path | None) -> None:
        self.note: str | None = None
        self._runs = runs
        self._cache = cache
        self._path: Path | None = None

    def read(self, settings: bool) -> dict[str, _Entry]:
        """Name of a run's folder -> what is kept of it."""
        columns = "folder, stamp, row, job" if settings else "folder, stamp, row, '{}'"
        found = {}
        for again in (True, False):
            try:
                with self._open() as base:
                    for name, stamp, row, job in base.execute(f"select {columns} from run"):
                        with contextlib.suppress(msgspec.DecodeError):  # read anew
                            found[name] = _Entry(stamp, _ROW.decode(row), _JOB.decode(job))
                return found
            except _Unusable as error:
                if not (error.is_damaged and again and self._remove()):
                    self.note = f"the index of runs is not kept: {error}"
                    return {}
        return {}

    def write(self, fresh: Mapping[str, _Entry], gone: Iterable[str]) -> None:
        """Keep what was read, and forget what is gone."""
        if self.note is not None:
            return
        rows = [
            (name, one.stamp, _JSON.encode(one.row), _JSON.encode(one.settings))
            for name, one in fresh.items()
            if one.row.damage is None  # it may be the disk that could not be read just now
        ]
        try:
            with self._open() as base:
                base.execute("begin immediate")
                base.executemany("insert or replace into run values(?,?,?,?)", rows)
                base.executemany("delete from run where folder = ?", [(name,) for name in gone])
                base.execute("commit")
        except _Unusable as error:
            self.note = f"the index of runs is not kept: {error}"

    @contextlib.contextmanager
    def _open(self) -> "Iterator[sqlite3.Connection]":
        try:
            import sqlite3
        except ImportError:
            raise _Unusable("this Python has no sqlite3") from None
        try:
            path = self._path = self._path or _place(self._runs, self._cache)
            base = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
        except (OSError, RuntimeError, sqlite3.Error) as error:
            raise _Unusable(str(error)) from None
        try:
            base.execute("pragma synchronous=off")  # what a power cut damages is read anew
            base.execute(_TABLE)
            yield base
        except sqlite3.Error as error:
            is_damaged = not isinstance(error, sqlite3.OperationalError)
            raise _Unusable(f"{path}: {error}", is_damaged=is_damaged) from None
        finally:
            base.close()

    def _remove(self) -> bool:
        try:
            assert self._path is not None
            self._path.unlink(missing_ok=True)
        except OSError:
            return False
        return True


class _Unusable(Exception):
    """The index cannot be read or written now."""

    def __init__(self, why: str, *, is_damaged: bool = False) -> None:
        super().__init__(why)
        self.is_damaged = is_damaged


def _place(runs: Path, cache: Path | None) -> Path:
    """The index of a folder of runs. Its name has a digest of the folder and of the code that makes
    rows: another version never meets it, whatever it changed.

    Raises:
        OSError: The cache folder cannot be made.
        RuntimeError: The user has no home.
    """
    cache = cache or user_cache()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = hashlib.sha256(os.fsencode(runs))
    for module in (history, run_files, run_row):
        digest.update(Path(module.__file__ or "").read_bytes())
    path = cache / f"runs-{digest.hexdigest()[:24]}.sqlite"
    if not path.exists():
        sweep(cache, "runs-*.sqlite")
    return path


_ROW = msgspec.json.Decoder(RunRow)
_JOB = msgspec.json.Decoder(dict[str, Any])
_JSON = msgspec.json.Encoder(enc_hook=str)
"""A date in a job file is no JSON: it is kept as text."""
