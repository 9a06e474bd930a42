"""What becomes of a save, and the save that training stands still for.

Each rank writes its share of the state, reads it back and hashes it; rank 0 seals the folder with a
manifest and commits it (`_files.py`). Here all ranks do so at once, and hear whether it worked on
all; beside training, a process of each rank does (`writer.py`), by the same code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from paceline.errors import Problem, RunError
from paceline.runtime.checkpoint._all_ranks import Group, gather
from paceline.runtime.checkpoint._files import (
    WriteError,
    WriteTask,
    publish_part,
    remove_unfinished,
    seal,
    write_part,
)
from paceline.runtime.checkpoint._process import OnPhase
from paceline.runtime.checkpoint._reason import plain_reason
from paceline.runtime.checkpoint._save_plan import SavePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One checkpoint that is on the disk and committed."""

    path: Path
    step: int
    num_bytes: int
    """Bytes of all ranks' data files together."""

    stall_s: float
    """How long this rank's training stood still for it."""

    write_s: float
    """From its start to the commit, as rank 0 saw it."""


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
                else "repair the folder; training goes on and the next save tries again",
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """What one rank did of a save."""

    reason: str | None = None
    is_space: bool = False
    num_bytes: int = 0
    """Bytes of all data files; only from the rank that committed."""

    seconds: float = 0.0
    """From the start until this rank's writer was through."""


def failure_of(task: WriteTask, parts: Sequence[PartOutcome]) -> SaveFailed | None:
    """The lowest rank's reason why a save failed, want of disk first; None when all went well."""
    failed = [(rank, part) for rank, part in enumerate(parts) if part.reason is not None]
    if not failed:
        return None
    rank, first = next(((r, part) for r, part in failed if part.is_space), failed[0])
    told = first.reason if len(parts) == 1 else f"{first.reason} (rank {rank})"
    return SaveFailed(task.manifest.step, str(told), task.folder, is_space=first.is_space)


def write_together(
    task: WriteTask, plan: SavePlan, *, group: Group, on_phase: OnPhase | None
) -> int:
    """Write a checkpoint with all ranks, and return once it is committed. Collective.

    Returns:
        Bytes of its data files.

    Raises:
        SaveFailed: On all ranks alike, with nothing left behind under a checkpoint's name.
    """
    parts = gather(_write_part(task, plan, on_phase), group)
    failed = failure_of(task, parts)
    if failed is None:
        parts = gather(_seal(task, plan.metadata), group)
        failed = failure_of(task, parts)
    if failed is not None:
        if task.rank == 0:
            remove_unfinished(task)
        dist.barrier(group)  # nobody goes on, to a next save or a fresh look, before it is gone
        raise failed
    return parts[0].num_bytes


def _write_part(task: WriteTask, plan: SavePlan, on_phase: OnPhase | None) -> PartOutcome:
    try:
        part = write_part(task, plan.share.records, plan.share.values)
        if on_phase is not None:
            on_phase("writing")
        publish_part(task, part)
    except WriteError as failed:
        return PartOutcome(reason=failed.reason, is_space=failed.is_space)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        return PartOutcome(reason=plain_reason(error))
    return PartOutcome()


def _seal(task: WriteTask, metadata: bytes) -> PartOutcome:
    if task.rank != 0:
        return PartOutcome()
    try:
        return PartOutcome(num_bytes=seal(task, metadata))
    except WriteError as failed:
        return PartOutcome(reason=failed.reason, is_space=failed.is_space)
