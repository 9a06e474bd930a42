"""The result of `paceline data check`, kept by the names of the files and found by their contents.

In `.paceline/checks` beside the job file; without a job, in the current folder.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from paceline.errors import JobError
from paceline.job import Job
from paceline.job.sources import find_held_out, find_sources, patterns_of
from paceline.prepare.contents import contents_of


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a check."""

    at: str
    """Date and time, UTC."""

    contents: str
    """Hash of all files' contents."""

    findings: int
    errors: int
    worst: str = ""
    seq_len: int | None = None
    has_changed: bool = False

    def __str__(self) -> str:
        """In a few words.

        >>> str(Checked(at="2026-11-23T10:00:00Z", contents="", findings=3, errors=1))
        'checked 2026-11-23, 3 findings (1 error)'
        """
        if self.has_changed:
            return f"changed since they were checked on {self.at[:10]}"
        words = [f"{self.findings} finding{'' if self.findings == 1 else 's'}"]
        if self.errors:
            words.append(f"({self.errors} error{'' if self.errors == 1 else 's'})")
        return f"checked {self.at[:10]}, {' '.join(words)}"


def files_of(job: Job) -> tuple[list[str], list[str]]:
    """Files that a job trains on, and those that it evaluates on.

    Raises:
        JobError: D001, a pattern matches none.
    """
    held_out = find_held_out(job)
    train = [file for source in find_sources(job) for file in source.files]
    return train, list(held_out.files) if held_out is not None else []


def keep_checked(
    folder: Path, files: Sequence[str], evals: Sequence[str], checked: dict[str, Any]
) -> Checked:
    """Write the result of a check of these files."""
    kept = folder / ".paceline" / "checks"
    found = Checked(**checked, contents=_contents([*files, *evals], kept))
    path = kept / _name(folder, files, evals)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        kept.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(found))
        unfinished.replace(path)
    except OSError as error:
        raise JobError.of(
            code="D015",
            what=f"the result cannot be kept in {kept}: {error.strerror}",
            where=str(kept),
            fix="make the folder writable, or give --no-keep",
        ) from None
    return found


def find_checked(job: Job) -> Checked | None:
    """What is known of a job's data; None where they were never checked, or cannot be found here.

    Files are read again only where their size or time has changed; object storage is not asked.
    """
    kept = job.folder / ".paceline" / "checks"
    if not kept.is_dir() or any("://" in pattern for pattern in patterns_of(job)):
        return None
    try:
        files, evals = files_of(job)
    except JobError:  # said by whoever needs the files
        return None
    try:
        found = msgspec.json.decode(
            (kept / _name(job.folder, files, evals)).read_bytes(), type=Checked
        )
        is_same = found.contents == _contents([*files, *evals], kept)
    except (OSError, msgspec.MsgspecError, JobError):
        return None
    return msgspec.structs.replace(found, has_changed=not is_same)


def checked_text(job: Job) -> str | None:
    """What a plan says of the job's data; None where it reads no files of its own here."""
    checked = find_checked(job)
    if checked is not None:
        length, asked = checked.seq_len, job.spec.data.seq_len
        is_other = length is not None and length != asked
        return f"{checked}" + (f", for seq_len {length} and not {asked}" if is_other else "")
    patterns = patterns_of(job)
    if not patterns or any("://" in pattern for pattern in patterns):
        return None
    try:
        files_of(job)
    except JobError:
        return None
    return f"not checked; to check it: paceline data check --job {job.source}"


def _contents(files: Sequence[str], cache: Path) -> str:
    found = contents_of(files, cache)
    return xxhash.xxh3_128_hexdigest("".join(found[file] for file in files).encode())


def _name(folder: Path, files: Sequence[str], evals: Sequence[str]) -> str:
    names = [[os.path.relpath(file, folder) for file in each] for each in (files, evals)]
    return f"{xxhash.xxh3_64_hexdigest(msgspec.json.encode(names))}.json"
