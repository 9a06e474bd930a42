"""What a checkpoint is on the disk, which ones are whole, and which are kept. No torch.

    checkpoints/
      step-00000050/
        __0_0.distcp ...   the data files, as torch.distributed.checkpoint writes them
        .metadata          its table of contents
        tensors.json       where each part of each tensor lies in them, with its xxh3-128
        manifest.json      every file's size and xxh3-128, and what the state is of
        COMMIT             xxh3-128 of manifest.json
      step-00000100.3f2a.tmp/   being written, or left by a crash: never read

torch.distributed.checkpoint itself loads a flipped bit or a cut-off shard in silence (measured,
torch 2.13); nothing is loaded here that its manifest does not vouch for.

Leaves out: writing and reading the data files (`runtime/checkpoint/`), and malice: xxh3 finds
accidents, not forgeries.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import xxhash

from paceline.errors import Problem
from paceline.record.best import Best
from paceline.record.tensors import TENSORS, damaged_tensors, read_tensors
from paceline.units import format_bytes

FORMAT = 2
"""Version of the folder's form. Form 1 had no `tensors.json`: its damages are told by file."""

_READABLE = (1, 2)
"""A reader refuses a form that it does not know."""

MANIFEST = "manifest.json"
METADATA = ".metadata"
COMMIT = "COMMIT"

_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}(\.[0-9a-f]+)?\.(tmp|deleting|replaced)")
"""Folders of ours that are no checkpoint: half written, half deleted, or replaced."""

_CHUNK_BYTES = 1 << 20
_USE_EARLIER = "nothing to do if an earlier checkpoint is valid: it is used instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One data file as it was when it was written."""

    size: int
    xxh3_128: str
    """Hash of the contents, 32 hex digits."""


BatchChanges = tuple[tuple[int, int], ...]
"""In order: a step, and the samples of each step from there on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds, and the proof of each file."""

    step: int
    """Optimizer steps done."""

    world_size: int
    """Ranks that wrote it. Any number can read it."""

    files: Mapping[str, FileRecord]
    layout: str = ""
    """Name of the layout it was trained in, for people."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    """Degrees of that layout: ranks that share each way of splitting the work."""

    seed: int | None = None
    """Samples and random numbers of a step follow from it and the step's number."""

    samples: int | None = None
    """Consumed up to that step: where the data goes on."""

    written_by: str = ""
    job_digest: str | None = None
    """Digest of the resolved job, where the caller gave one."""

    held_out_loss: float | None = None
    """Newest evaluation loss at that step; what keep-best compares."""

    state_digest: str | None = None
    """SHA-256 of parameters and optimizer state, where the caller gave it."""

    loss_scaler: Mapping[str, float] | None = None
    """State of fp16's loss scaler after that step; None in other precisions."""

    batches: BatchChanges = ()
    """Where the global batch changed its size up to that step; empty where it never did."""

    best: Best | None = None
    """The run's best evaluation up to that step, where it is kept or waited for."""

    created: str = ""
    """When, UTC, ISO 8601."""

    format: int = FORMAT
    """Version of this form."""

    @property
    def num_bytes(self) -> int:
        """Size of all data files together."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint folder, seen from outside: its data files are not hashed for this."""

    step: int
    """Optimizer steps done."""

    path: Path
    manifest: Manifest | None
    """None unless it was committed: COMMIT is there and is the manifest's hash."""

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None

    @property
    def held_out_loss(self) -> float | None:
        return self.manifest.held_out_loss if self.manifest is not None else None


def checkpoint_name(step: int) -> str:
    """Folder name of a step: `step-00000050`."""
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Step of a folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """Every checkpoint below a folder, newest first; unfinished `.tmp` folders are none.

    A folder that does not exist has no checkpoints.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = (_NAME.fullmatch(name) for name in names)
    steps = sorted((int(match[1]) for match in matches if match), reverse=True)
    paths = ((step, folder / checkpoint_name(step)) for step in steps)
    return [
        CheckpointEntry(
            step=step,
            path=path,
            manifest=None if isinstance(found := read_manifest(path), Problem) else found,
        )
        for step, path in paths
    ]


def read_manifest(path: Path, *, name: str | None = None) -> Manifest | Problem:
    """The manifest of a checkpoint folder, or why it is not to be trusted.

    Args:
        name: That it should have, where it has another for now.
    """
    where, fix = str(path), _USE_EARLIER
    try:
        sealed = (path / COMMIT).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        what = f"{path.name} has no COMMIT: its save never finished"
        return Problem(code="C001", what=what, where=where, fix=fix)
    except (OSError, UnicodeDecodeError) as error:
        what = f"{COMMIT} of {path.name} cannot be read: {error}"
        return Problem(code="C001", what=what, where=where, fix=fix)
    try:
        encoded = (path / MANIFEST).read_bytes()
    except OSError as error:
        what = f"{MANIFEST} of {path.name} cannot be read: {error.strerror}"
        return Problem(code="C002", what=what, where=where, fix=fix)
    return parse_manifest(encoded, sealed, name=name or path.name, where=where)


def parse_manifest(encoded: bytes, sealed: str, *, name: str, where: str) -> Manifest | Problem:
    """A manifest, or why it is not to be trusted."""
    fix = _USE_EARLIER
    if xxhash.xxh3_128_hexdigest(encoded) != sealed:
        what = f"{MANIFEST} of {name} is not the one its COMMIT was written for"
        return Problem(code="C002", what=what, where=where, fix=fix)
    try:
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except msgspec.DecodeError as error:
        what = f"{MANIFEST} of {name} cannot be understood: {error}"
        return Problem(code="C002", what=what, where=where, fix=fix)
    if manifest.format not in _READABLE:
        known = " and ".join(map(str, _READABLE))
        what = f"{name} has form {manifest.format}, this Paceline reads form {known}"
        return Problem(code="C006", what=what, where=where, fix="use the Paceline that wrote it")
    if checkpoint_name(manifest.step) != name:
        what = f"{name} holds step {manifest.step}: the folder was renamed or swapped"
        return Problem(code="C006", what=what, where=where, fix=fix)
    return manifest


def verify_checkpoint(path: Path, *, name: str | None = None) -> Problem | None:
    """The first thing that is wrong with a checkpoint, or None when every byte is as written.

    Reads every data file once, 1 MiB at a time; a damaged one again, to name the tensors.
    """
    return next(find_damage(path, name=name), None)


def find_damage(path: Path, *, name: str | None = None) -> Iterator[Problem]:
    """Everything that is wrong with a checkpoint, one problem for each damaged file."""
    manifest = read_manifest(path, name=name)
    if isinstance(manifest, Problem):
        yield manifest
        return
    for file in sorted(manifest.files):
        problem = check_file(path, file, manifest)
        if problem is not None:
            yield problem


def check_outside(path: Path, manifest: Manifest) -> Problem | None:
    """The first thing that is wrong with a checkpoint as far as can be seen without its values:
    the sizes of all files, and every byte of the tables."""
    for name in sorted(manifest.files):
        is_table = name in (METADATA, TENSORS)
        problem = check_file(path, name, manifest, only_size=not is_table)
        if problem is not None:
            return problem
    return None


def check_file(
    path: Path, name: str, manifest: Manifest, *, only_size: bool = False
) -> Problem | None:
    """What is wrong with one file of a checkpoint, damaged tensors named; None when it is right."""
    expected, where = manifest.files[name], str(path / name)
    fix = "an earlier checkpoint is used, if one is whole; look at the disk's health"
    try:
        size = (path / name).stat().st_size
        if size != expected.size:
            what = (
                f"{name} in {path.name} has {size} bytes ({format_bytes(size)}), "
                f"{expected.size} were written{_whose(path, name, manifest)}"
            )
            return Problem(code="C004", what=what, where=where, fix=fix)
        found = expected if only_size else hash_file(path / name)
    except FileNotFoundError:
        what = f"{name} is missing in {path.name}{_whose(path, name, manifest)}"
        return Problem(code="C003", what=what, where=where, fix=fix)
    except OSError as error:
        what = f"{name} in {path.name} cannot be read: {error.strerror or error}"
        return Problem(code="C003", what=what, where=where, fix=fix)
    if found == expected:
        return None
    others = [other for other, record in manifest.files.items() if record == found]
    told = f": it has the bytes of {others[0]}" if others else ": its hash differs"
    what = f"{name} in {path.name} is not what was written{told}{_whose(path, name, manifest)}"
    return Problem(code="C005", what=what, where=where, fix=fix)


def damaged_in(path: Path, name: str) -> list[str]:
    """Names of the tensors that one file of a checkpoint has not as they were written.

    Nothing for a file that holds none, and where the table of tensors cannot be trusted.
    """
    manifest = read_manifest(path)
    return [] if isinstance(manifest, Problem) else _damaged_in(path, name, manifest)


def newest_valid(folder: Path) -> tuple[CheckpointEntry | None, list[tuple[Path, Problem]]]:
    """The newest checkpoint whose every byte is as written, and the newer ones refused."""
    refused: list[tuple[Path, Problem]] = []
    for entry in list_checkpoints(folder):
        problem = verify_checkpoint(entry.path)
        if problem is None:
            return entry, refused
        refused.append((entry.path, problem))
    return None, refused


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint that is complete, whether or not its bytes are right; 0 when
    there is none."""
    complete = (entry.step for entry in list_checkpoints(folder) if entry.is_complete)
    return next(complete, 0)


def hash_file(path: Path) -> FileRecord:
    """Size and hash of a file as it can be read back now."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size=size, xxh3_128=digest.hexdigest())


def commit(tmp: Path, final: Path, manifest: Manifest) -> None:
    """Make a written folder a checkpoint, so that a crash at any point leaves all of it or none.

    fsync of the files, manifest, COMMIT, fsync of the folder, rename, fsync of the parent: under
    its final name a checkpoint is whole, or it is not there. What was under that name is put
    aside, and removed only once the new one is in place.

    Raises:
        OSError: The disk refused; the folder is as good as not there, and `prune` removes it.
    """
    for name in manifest.files:
        sync_path(tmp / name)
    encoded = msgspec.json.encode(manifest)
    _write_synced(tmp / MANIFEST, encoded)
    _write_synced(tmp / COMMIT, xxhash.xxh3_128_hexdigest(encoded).encode("ascii"))
    sync_path(tmp)
    aside = final.with_name(final.name + ".replaced")
    if final.exists():
        _remove(aside)
        final.rename(aside)
    try:
        tmp.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    sync_path(final.parent)
    _remove(aside)


def utc_now() -> str:
    """The time for a manifest."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def choose_deletions(
    entries: Sequence[CheckpointEntry], *, keep_last: int, keep_every: int | None, keep_best: int
) -> list[CheckpointEntry]:
    """Which checkpoints the policy does not keep; never the newest complete one.

    Args:
        keep_last: How many of the newest complete ones are kept; at least one is.
        keep_every: Also keep every complete one whose step is a multiple of this.
        keep_best: Also keep this many complete ones with the lowest evaluation loss; of equals, the
            newer.

    An incomplete one counts for nothing. It goes when a newer complete one exists; until then it
    stays, as it may be all that is left to look at.
    """
    newest_first = sorted(entries, key=lambda entry: entry.step, reverse=True)
    complete = [entry for entry in newest_first if entry.is_complete]
    if not complete:
        return []
    measured = [entry for entry in complete if entry.held_out_loss is not None]
    best = sorted(measured, key=lambda entry: (entry.held_out_loss, -entry.step))[:keep_best]
    kept = {entry.step for entry in (*complete[: max(1, keep_last)], *best)}
    if keep_every is not None:
        kept |= {entry.step for entry in complete if entry.step % keep_every == 0}
    return [
        entry
        for entry in newest_first
        if entry.step not in kept and (entry.is_complete or entry.step < complete[0].step)
    ]


def set_aside(refused: Iterable[Path]) -> None:
    """Rename checkpoints that were refused, once an older one is in use, to `step-N.refused`.

    They stay for whoever wants to look, and no longer count: neither as the newest, nor among
    those that the policy keeps. What is set aside already stays as it is.
    """
    for path in refused:
        if checkpoint_step(path.name) is None or not path.exists():
            continue
        aside, again = path.with_name(f"{path.name}.refused"), 1
        while aside.exists():
            again += 1
            aside = path.with_name(f"{path.name}.refused-{again}")
        path.rename(aside)


def prune(
    folder: Path, *, keep_last: int, keep_every: int | None, keep_best: int
) -> list[CheckpointEntry]:
    """Delete what the policy does not keep, and what crashes left behind.

    Only one process may prune a folder, and only while no save is being written to it.

    Returns:
        The checkpoints that were deleted.

    Raises:
        OSError: The disk refused; whatever was not deleted is deleted next time.
    """
    entries = list_checkpoints(folder)
    deleted = choose_deletions(
        entries, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best
    )
    for entry in deleted:
        # Renamed first: a crash half-way through the removal leaves no half checkpoint.
        doomed = entry.path.with_name(entry.path.name + ".deleting")
        _remove(doomed)
        entry.path.rename(doomed)
    for path in sorted(folder.iterdir()):
        if _UNFINISHED.fullmatch(path.name):
            _remove(path)
    return deleted


_MOST_NAMED = 3
"""Tensors that a problem names before it counts the rest."""


def _damaged_in(path: Path, name: str, manifest: Manifest) -> list[str]:
    try:
        if name == TENSORS or hash_file(path / TENSORS) != manifest.files.get(TENSORS):
            return []
        table = read_tensors(path) or {}
        if (path / name).exists():
            return damaged_tensors(path, name, table)
        pieces = ((each, piece) for each, record in table.items() for piece in record.pieces)
        return list(dict.fromkeys(each for each, piece in pieces if piece.file == name))
    except (OSError, msgspec.DecodeError):
        return []


def _whose(path: Path, name: str, manifest: Manifest) -> str:
    """`; damaged: model/a, model/b and 7 more`, where the table of tensors can be trusted."""
    damaged = _damaged_in(path, name, manifest)
    if not damaged:
        return ""
    rest = len(damaged) - _MOST_NAMED
    return f"; damaged: {', '.join(damaged[:_MOST_NAMED])}" + (f" and {rest} more" * (rest > 0))


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Have a file, or the names in a folder, on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
