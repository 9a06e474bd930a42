"""Which files a job trains on and which are held out: names and sizes, no contents.

Leaves out: reading the text (`runtime/data/`) and anything but files of bytes on a disk.
"""

import difflib
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from paceline.errors import JobError, Problem
from paceline.job.job import Job

_Match = TypeVar("_Match", str, Path)

SEPARATOR = b"\n"
"""Put between two files."""

_LOOKED_AT = 8192
"""Bytes of each file searched for a zero byte, which text does not have; git does the same."""

_ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
"""Ends of names of files that hold rows with columns."""

_ARRAY_OF_ROWS = re.compile(rb"\s*\[\s*\{\s*\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The text of a job, in training and held-out files, both sorted by name."""

    train: tuple[Path, ...]
    """Files to train on."""

    held_out: tuple[Path, ...]
    """Files kept for evaluation; empty when the job holds nothing out."""

    num_train_bytes: int
    """Bytes to train on, with one separator between two files."""

    num_held_out_bytes: int
    """Bytes kept for evaluation."""

    split_byte: int | None = None
    """With a single file, which is then in both lists: where its held-out end begins."""

    padding: ClassVar[float | None] = None
    """Share of a batch that no text fills: windows are whole."""

    fingerprint: str = ""
    """Changes when a file is added, removed, renamed or resized: 16 hex digits."""

    @property
    def num_files(self) -> int:
        """On both sides."""
        return len({*self.train, *self.held_out})

    def num_samples(self, seq_len: int) -> int:
        """Samples to train on."""
        return max(0, (self.num_train_bytes - 1) // seq_len)


def find_corpus(job: Job) -> Corpus:
    """The files that `data` of a job asks for.

    A folder means all files below it. Hidden files are left out, as are empty ones. Which files
    are held out follows from a hash of each file's path relative to the job file, so adding a file
    moves no other one; at least one file is on each side.

    Raises:
        JobError: Nothing matches, a file cannot be read or is no text, or there is too little.
    """
    asked = job.spec.data.path
    found = stdlib_files(job) if asked is None else match_all(job, asked, "data.path", expand)
    sizes = _readable_sizes(job, found)
    files = [path for path in found if sizes[path]]
    if not files:
        raise JobError(_all_empty(job, found))
    corpus = _split(job, files, sizes)
    JobError.raise_for(_check_lengths(job, corpus))
    return corpus


def unreadable_file(path: Path, error: OSError) -> JobError:
    """D002 for a file that was found and cannot be read."""
    return JobError(_unreadable(path, error, where=str(path)))


def stdlib_files(job: Job) -> list[Path]:
    """The source of the standard library: about 30 MB, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    files.sort()
    if files:
        return files
    raise JobError.of(
        code="D001",
        what=f"this Python has no library source: no *.py file below {root}",
        where=job.where("data.corpus"),
        fix="use a Python with its source, or your own text with data.path",
    )


def match_all(
    job: Job,
    asked: str | Sequence[str],
    field: str,
    matches_of: Callable[[str, Path], Iterable[_Match]],
) -> list[_Match]:
    """What patterns of a field mean, sorted.

    Raises:
        JobError: D001, a pattern matches nothing, or there is none.
    """
    patterns = [asked] if isinstance(asked, str) else asked
    found = {pattern: list(matches_of(pattern, job.folder)) for pattern in patterns} or {"": []}
    JobError.raise_for(no_match(job, pattern, field) for pattern in found if not found[pattern])
    return sorted({match for matches in found.values() for match in matches})


def expand(pattern: str, folder: Path) -> list[Path]:
    """Files that a glob, a folder or a file name means; an existing name is never a glob."""
    path = folder / os.path.expanduser(pattern)
    try:
        if path.is_file():
            return [Path(os.path.normpath(path))]
        if path.is_dir():
            return list(_files_below(path))
    except OSError as error:
        raise unreadable_file(path, error) from None
    below = (Path(os.path.normpath(name)) for name in glob.iglob(str(path), recursive=True))
    return [path for path in below if path.is_file()]


def _files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder, hidden ones left out.

    Raises:
        OSError: A folder in it may not be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(os.path.normpath(folder), onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _readable_sizes(job: Job, files: Sequence[Path]) -> dict[Path, int]:
    """Size of each file, after opening every one; the library's own source may hold zero bytes."""
    sizes: dict[Path, int] = {}
    problems, binary, rows = [], [], []
    is_asked = job.spec.data.kind == "text" and job.spec.model.tokenizer == "bytes"
    for path in files:
        try:
            with path.open("rb") as file:
                sizes[path] = os.fstat(file.fileno()).st_size
                start = b"" if job.spec.data.path is None else file.read(_LOOKED_AT)
                if not is_asked and start and holds_rows(path.name, start):
                    rows.append(path)
                elif b"\0" in start:
                    binary.append(path)
        except OSError as error:
            problems.append(_unreadable(path, error, where=job.where("data.path")))
    if rows:
        problems.append(_rows_as_bytes(job, rows, len(files)))
    if binary:
        problems.append(_not_text(job, binary, len(files)))
    if problems:
        raise JobError(*problems)
    return sizes


def _split(job: Job, files: Sequence[Path], sizes: dict[Path, int]) -> Corpus:
    share = job.spec.data.held_out
    root = Path(sysconfig.get_path("stdlib")) if job.spec.data.path is None else job.folder
    names = {path: Path(os.path.relpath(path, root)).as_posix() for path in files}
    listing = "\n".join(f"{names[path]} {sizes[path]}" for path in files)
    fingerprint = hashlib.sha256(listing.encode(errors="surrogateescape")).hexdigest()[:16]
    if len(files) == 1 and share > 0:
        (only,) = files
        split_byte = sizes[only] - round(sizes[only] * share)
        return Corpus(
            train=(only,),
            held_out=(only,),
            num_train_bytes=split_byte,
            num_held_out_bytes=sizes[only] - split_byte,
            split_byte=split_byte,
            fingerprint=fingerprint,
        )
    held_out = _held_out_files(files, names, share)
    train = tuple(path for path in files if path not in held_out)
    kept = tuple(path for path in files if path in held_out)
    return Corpus(
        train=train,
        held_out=kept,
        num_train_bytes=_joined_size(train, sizes),
        num_held_out_bytes=_joined_size(kept, sizes),
        fingerprint=fingerprint,
    )


def _held_out_files(files: Sequence[Path], names: dict[Path, str], share: float) -> set[Path]:
    if share == 0:
        return set()
    by_hash = sorted(files, key=lambda path: (_hash_of(names[path]), names[path]))
    num_below = sum(_hash_of(names[path]) < share for path in files)
    return set(by_hash[: min(max(num_below, 1), len(files) - 1)])


def _hash_of(name: str) -> float:
    """A number from 0 up to 1 that only depends on the name, on every machine and Python."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _joined_size(files: Sequence[Path], sizes: dict[Path, int]) -> int:
    return sum(sizes[path] for path in files) + len(SEPARATOR) * max(0, len(files) - 1)


def _check_lengths(job: Job, corpus: Corpus) -> Iterator[Problem]:
    """One sample of each split needs seq_len bytes, and one more for the last target."""
    seq_len, needed = job.spec.data.seq_len, job.spec.data.seq_len + 1
    if corpus.num_train_bytes < needed:
        longest = corpus.num_train_bytes - 1
        yield Problem(
            code="D004",
            what=f"data.seq_len {seq_len} needs {needed} bytes, the training split has "
            f"{corpus.num_train_bytes}",
            where=job.where("data.seq_len"),
            fix=(f"set data.seq_len to {longest} or less, or " if longest > 1 else "")
            + "give more text in data.path",
        )
    if corpus.held_out and corpus.num_held_out_bytes < needed:
        total = corpus.num_train_bytes + corpus.num_held_out_bytes
        enough = needed / total
        raise_share = (
            f"raise data.held_out to {enough + 0.005:.2f}, "
            if corpus.split_byte is not None and enough < 0.5
            else ""
        )
        yield Problem(
            code="D005",
            what=f"the held-out split has {corpus.num_held_out_bytes} bytes "
            f"({job.spec.data.held_out:g} of {total}), one sample of data.seq_len {seq_len} "
            f"needs {needed}",
            where=job.where("data.held_out"),
            fix=f"{raise_share}lower data.seq_len, give more text, or set data.held_out: 0 to "
            "train without evaluation",
        )


def no_match(job: Job, pattern: str, field: str = "data.path") -> Problem:
    """D001 for a pattern of this field that no file has."""
    near = _near_misses(pattern, job.folder)
    return Problem(
        code="D001",
        what=f"{field} {pattern!r} matches no file in {job.folder}"
        if pattern
        else f"{field} is an empty list",
        where=job.where(field),
        fix=f"did you mean {near}?" if near else "give a file, a folder or a glob that exists",
    )


def _near_misses(pattern: str, folder: Path) -> str:
    """What is there instead, where the pattern stops being true: a few names."""
    here = folder
    for part in Path(os.path.expanduser(pattern)).parts:
        if not glob.has_magic(part) and (here / part).is_dir():
            here = here / part
            continue
        if here == Path(here.anchor):
            return ""  # what is not mounted here is no slip for a folder of the system
        try:
            names = sorted(name for name in os.listdir(here) if not name.startswith("."))
        except OSError:
            return ""
        near = difflib.get_close_matches(part.replace("*", ""), names, n=3, cutoff=0.5)
        return " or ".join(os.path.relpath(here / name, folder) for name in near)
    return ""


def _unreadable(path: Path, error: OSError, *, where: str) -> Problem:
    return Problem(
        code="D002",
        what=f"{path} cannot be read: {error.strerror or error}",
        where=where,
        fix=f"make it readable (chmod u+r {path}), or leave it out of data.path",
    )


def holds_rows(name: str, start: bytes) -> bool:
    """Whether a file is rows with columns, by its name or its first two lines."""
    if name.lower().endswith(_ROWS) or _ARRAY_OF_ROWS.match(start):
        return True
    lines = start.split(b"\n", 2)[:2]
    if len(lines) < 2 or not all(line.lstrip().startswith(b"{") for line in lines):
        return False
    try:
        return all(isinstance(json.loads(line), dict) for line in lines)
    except ValueError:
        return False


def _rows_as_bytes(job: Job, rows: Sequence[Path], num_files: int) -> Problem:
    shown = ", ".join(str(path) for path in rows[:3]) + (", ..." if len(rows) > 3 else "")
    return Problem(
        code="D006",
        what=f"{len(rows)} of {num_files} files hold rows, and without a tokenizer the model would "
        f"be trained on their raw bytes, with keys, quotes and brackets: {shown}",
        where=job.where("data.path"),
        fix="give model.tokenizer, a folder with a tokenizer.json, and the rows' texts or "
        "conversations are read; or leave these files out of data.path. To train on the raw bytes "
        "after all, set data.kind: text and model.tokenizer: bytes",
    )


def _not_text(job: Job, binary: Sequence[Path], num_files: int) -> Problem:
    shown = ", ".join(str(path) for path in binary[:3]) + (", ..." if len(binary) > 3 else "")
    return Problem(
        code="D003",
        what=f"{len(binary)} of {num_files} files hold zero bytes, which text does not: {shown}",
        where=job.where("data.path"),
        fix="leave them out of data.path, for example with a glob such as corpus/**/*.txt; "
        "turn UTF-16 text into UTF-8",
    )


def _all_empty(job: Job, files: Sequence[Path]) -> Problem:
    names = f"{files[0]} is" if len(files) == 1 else f"all {len(files)} files are"
    return Problem(
        code="D003",
        what=f"{names} empty",
        where=job.where("data.path"),
        fix="give files with text in them",
    )
