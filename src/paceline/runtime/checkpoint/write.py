"""Write one checkpoint with all ranks: whole and committed, or gone and everybody knows why.

Each rank writes its share of the state into `step-N.tmp`, reads its files back and hashes them;
rank 0 seals the folder with a manifest and commits it (`record/checkpoints.py`). After every part
all ranks hear whether it worked on all, so that a full disk on one of them hangs nobody.

The hash is of what can be read back, which the page cache answers: it finds a torn or short write
and anything that happens later, not a disk that already lies.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options, set_crc32_options

from paceline.errors import Problem, RunError
from paceline.record import checkpoints
from paceline.record.checkpoints import FileRecord, Manifest
from paceline.runtime.checkpoint._agree import Group, attempt, gather, plain_reason
from paceline.runtime.checkpoint._plans import SavePlanner
from paceline.runtime.checkpoint._share import Share, local_bytes
from paceline.units import format_bytes

OnPhase = Callable[[str], None]
"""Called with `writing` between the data files and the commit; a drill strikes there."""

_HEADER_BYTES = 2048
"""Disk a value takes over its own bytes, in its file and in the table of contents. Measured 1910 to
1975 for 84 to 228 tensors, blocks of the file system and manifest included (torch 2.13, ext4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint that is on the disk and committed."""

    path: Path
    """Its folder."""

    step: int
    """Optimizer steps done."""

    num_bytes: int
    """Of all ranks' data files together."""

    stall_s: float
    """How long this rank's training stood still for it."""

    write_s: float
    """From its start to the commit, on this rank."""


class SaveFailed(RunError):
    """A checkpoint could not be written. Raised on all ranks alike; earlier ones are untouched."""

    def __init__(self, step: int, reason: str, path: Path, *, is_space: bool = False) -> None:
        self.step = step
        self.reason = reason
        super().__init__(
            Problem(
                code="C007" if is_space else "C008",
                what=f"the checkpoint of step {step} could not be saved: {reason}",
                where=str(path),
                fix="free some space there; training goes on and the next save tries again"
                if is_space
                else "mend the folder; training goes on and the next save tries again",
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a manifest says besides its files."""

    step: int
    layout: str = ""
    job_digest: str | None = None
    held_out_loss: float | None = None
    state_digest: str | None = None
    loss_scaler: Mapping[str, float] | None = None


def write_checkpoint(
    folder: Path, share: Share, facts: Facts, *, group: Group, on_phase: OnPhase | None
) -> tuple[Path, int]:
    """The committed folder and the bytes of its data files. Collective over the group.

    Raises:
        SaveFailed: On all ranks alike, with nothing left behind under a checkpoint's name.
    """
    name = checkpoints.checkpoint_name(facts.step)
    tmp, final = folder / f"{name}.tmp", folder / name
    try:
        _make_room(tmp, share, facts.step, group)
        _write_files(tmp, share, facts.step, group)
        files = _hash_files(tmp, facts.step, group, on_phase)
        manifest = Manifest(
            step=facts.step,
            world_size=dist.get_world_size(group),
            files=files,
            layout=facts.layout,
            job_digest=facts.job_digest,
            held_out_loss=facts.held_out_loss,
            state_digest=facts.state_digest,
            loss_scaler=facts.loss_scaler,
            created=checkpoints.utc_now(),
        )
        _commit(tmp, final, manifest, group)
    except SaveFailed:
        if dist.get_rank(group) == 0:
            shutil.rmtree(tmp, ignore_errors=True)
        dist.barrier(group)  # nobody goes on, to a next save or a fresh look, before it is gone
        raise
    return final, manifest.num_bytes


def _make_room(tmp: Path, share: Share, step: int, group: Group) -> None:
    """An empty folder on a disk with room for all ranks' files."""

    def make() -> int:
        if dist.get_rank(group) == 0:
            if tmp.exists():
                shutil.rmtree(tmp)
            tmp.mkdir(parents=True)
        return free_bytes(tmp.parent)

    free, reason = attempt(make, group)
    if reason is not None:
        raise SaveFailed(step, reason, tmp.parent)
    rooms = gather((_disk_bytes(share), free or 0), group)
    needed = sum(need for need, _ in rooms)
    least_free = min(room for _, room in rooms)
    if least_free < needed:
        raise SaveFailed(step, _no_space(tmp.parent, needed, least_free), tmp.parent, is_space=True)


def _disk_bytes(share: Share) -> int:
    return local_bytes(share) + len(share) * _HEADER_BYTES


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write to the disk of a folder, or its nearest parent's."""
    while not folder.exists():
        folder = folder.parent
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _write_files(tmp: Path, share: Share, step: int, group: Group) -> None:
    """The data files of all ranks, synced. A failure on one rank is raised by torch on all."""
    writer = FileSystemWriter(tmp, single_file_per_rank=True, sync_files=True)
    reason: str | None = None
    try:
        with _without_crc32():
            save(dict(share), storage_writer=writer, planner=SavePlanner(), process_group=group)
    except CheckpointException as error:
        reason = _first_failure(error)
    except Exception as error:  # noqa: BLE001 - becomes a SaveFailed, by vote
        reason = plain_reason(error)
    reasons = [(rank, reason) for rank, reason in enumerate(gather(reason, group)) if reason]
    if not reasons:
        return
    free = gather(free_bytes(tmp.parent), group)
    needed = sum(gather(_disk_bytes(share), group))
    # By now what was written may be gone again, and what filled the disk as well.
    is_full = min(free) < max(needed, 1 << 20)
    if is_full or any(words in reason for _, reason in reasons for words in _FULL_DISK_WORDS):
        raise SaveFailed(step, _no_space(tmp.parent, needed, min(free)), tmp.parent, is_space=True)
    raise SaveFailed(step, reasons[0][1], tmp.parent)


_FULL_DISK_WORDS = ("no space left", "file write failed", "unexpected pos")
"""What the system says, and what torch's writer says after it: a write that came up short."""


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch's own checksum of every record is never read back, and costs a fifth of the processor
    time of a save (0.31 to 0.25 s for 130 MB, measured with torch 2.13); the manifest has better.

    The option is the process's: a `torch.save` of the training thread meanwhile writes none either.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _hash_files(
    tmp: Path, step: int, group: Group, on_phase: OnPhase | None
) -> dict[str, FileRecord]:
    """Every rank reads back its own files; all ranks get all records."""
    rank = dist.get_rank(group)

    def read_back() -> dict[str, FileRecord]:
        if on_phase is not None:
            on_phase("writing")
        mine = sorted(tmp.glob(f"__{rank}_*")) + ([tmp / ".metadata"] if rank == 0 else [])
        return {path.name: checkpoints.hash_file(path) for path in mine}

    records, reason = attempt(read_back, group)
    if reason is not None:
        raise SaveFailed(step, reason, tmp.parent)
    return {name: record for part in gather(records or {}, group) for name, record in part.items()}


def _commit(tmp: Path, final: Path, manifest: Manifest, group: Group) -> None:
    def seal() -> None:
        if dist.get_rank(group) == 0:
            checkpoints.commit(tmp, final, manifest)

    _, reason = attempt(seal, group)
    if reason is not None:
        is_space = "no space left" in reason
        raise SaveFailed(manifest.step, reason, tmp.parent, is_space=is_space)


def _no_space(folder: Path, needed: int, free: int) -> str:
    return (
        f"no space left on device: {folder}, {format_bytes(needed)} needed, "
        f"{format_bytes(free)} free"
    )


def _first_failure(error: CheckpointException) -> str:
    """torch collects every rank's exception; the lowest rank's is told."""
    failures = sorted(error.failures.items())
    if not failures:
        return plain_reason(error)
    _, (cause, _) = failures[0]
    return plain_reason(cause)
