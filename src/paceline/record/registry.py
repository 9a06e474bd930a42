"""The runs of a folder as rows: fast over thousands, and never wrong for it.

The run folders are the truth. Rows are kept in a file in the user's cache folder, which may be
thrown away at any time: a row is read again when a file of its run has changed, and all of them
when the file cannot be used.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import JobError
from paceline.record import history, run_files, run_row
from paceline.record.run_files import NAMES
from paceline.record.run_row import RunRow, read_files, standing_now
from paceline.record.user_cache import read_cached, user_cache, write_cached


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
    note, index = None, None
    try:
        index = _place(runs, cache)
    except (OSError, RuntimeError) as error:
        note = f"the index of runs is not kept: {error}"
    kept = _read_index(index) if index is not None and stamps else {}
    found = {
        name: kept[name]
        if name in kept and kept[name].stamp == stamp
        else _read(runs / name, stamp)
        for name, stamp in stamps.items()
    }
    # Of a damaged run it may be the disk that could not be read just now.
    whole = {name: one for name, one in found.items() if one.row.damage is None}
    if index is not None and whole != kept:
        try:
            write_cached(index, msgspec.json.encode(whole))
        except OSError as error:
            note = f"the index of runs is not kept: {error}"
    now_s = time.time()
    rows = [standing_now(entry.row, now_s) for entry in found.values()]
    return Listing(
        rows=sorted(rows, key=lambda row: (row.created_at, row.run)),
        settings={name: msgspec.json.decode(one.settings) for name, one in found.items()}
        if settings
        else {},
        note=note,
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


class _Entry(msgspec.Struct, frozen=True):
    """What is kept of a run."""

    stamp: str
    row: RunRow
    settings: msgspec.Raw
    """Settings of its job by dotted name, as JSON: read only where they are asked for."""


def _read(folder: Path, stamp: str) -> _Entry:
    row, settings = read_files(folder)
    return _Entry(stamp, row, msgspec.Raw(_JSON.encode(settings)))


def _read_index(path: Path) -> dict[str, _Entry]:
    """Name of a run's folder -> what is kept of it; nothing where the file is none of ours."""
    with contextlib.suppress(msgspec.MsgspecError):
        return _INDEX.decode(read_cached(path))
    return {}


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
    return cache / f"runs-{digest.hexdigest()[:24]}.json"


_INDEX = msgspec.json.Decoder(dict[str, _Entry])
_JSON = msgspec.json.Encoder(enc_hook=str)
"""A date in a job file is no JSON: it is kept as text."""
