"""Bring back a state: the newest checkpoint that is whole, the same one on every rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from paceline.errors import CheckpointError, PacelineError, Problem
from paceline.record import checkpoints
from paceline.record.checkpoints import CheckpointEntry
from paceline.record.remote import Remote
from paceline.runtime.checkpoint._agree import Group, attempt, from_first, gather
from paceline.runtime.checkpoint._plans import LoadPlanner
from paceline.runtime.checkpoint._target import Saved, Target, make_target, take_over
from paceline.runtime.state import MODEL, split_optimizer_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a run goes on from."""

    step: int = 0
    """Optimizer steps done; 0 when there was no checkpoint."""

    path: Path | None = None
    """The checkpoint that was loaded, or None when there was none: a fresh start."""

    held_out_loss: float | None = None
    """From its manifest."""

    loss_scaler: Mapping[str, float] | None = None
    """State of fp16's loss scaler, from its manifest; None for other precisions."""

    refused: list[tuple[Path, Problem]] = field(default_factory=list)
    """Newer checkpoints that were not whole, and why."""


def restore_newest(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: Group = None,
    job_digest: str | None = None,
    copies: str | None = None,
) -> Restored:
    """Load the newest valid checkpoint of a folder into a model and its optimizer. Collective.

    Rank 0 checks every byte of each candidate against its manifest, newest first; all ranks load
    the one it chooses. One that any rank fails to load is refused like a damaged one. It may have
    been written by any number of ranks in any layout.

    Args:
        folder: Where the checkpoint folders are.
        model: As it trains.
        optimizer: Over its parameters; with or without state.
        group: The ranks that load together; all of them when left out.
        job_digest: Of the job that goes on; a checkpoint that says it is of another is refused.
        copies: URL of a storage with copies: the newest that is whole becomes a checkpoint of the
            folder when there is none, or none that can be used.

    Raises:
        CheckpointError: There are checkpoints and none could be used. The state may be half loaded
            then, so a run must not go on with it.
    """
    first = dist.get_rank(group) == 0
    entries = from_first(checkpoints.list_checkpoints(folder) if first else [], group)
    refused: list[tuple[Path, Problem]] = []
    for entry in _then_copies(entries, folder, copies, refused, group):
        problem = from_first(_verify(entry.path, job_digest) if first else None, group)
        if problem is None:
            problem = _try_load(entry, model, optimizer, group)
        if problem is None:
            return Restored(
                step=entry.step,
                path=entry.path,
                held_out_loss=entry.held_out_loss,
                loss_scaler=entry.loss_scaler,
                refused=refused,
            )
        refused.append((entry.path, problem))
    if refused:
        raise CheckpointError(*(problem for _, problem in refused))
    return Restored()


def _then_copies(
    entries: list[CheckpointEntry],
    folder: Path,
    copies: str | None,
    refused: list[tuple[Path, Problem]],
    group: Group,
) -> Iterator[CheckpointEntry]:
    """The folder's checkpoints, and when all were refused the newest copy, downloaded."""
    yield from entries
    if copies is None:
        return
    fetched = None
    if dist.get_rank(group) == 0:
        fetched = _fetch(copies, folder)
    found = from_first(fetched, group)
    if isinstance(found, Problem):
        refused.append((Path(copies), found))
    elif found is not None:
        entry = next(e for e in checkpoints.list_checkpoints(folder) if e.path == found)
        yield entry


def _fetch(copies: str, folder: Path) -> Path | Problem | None:
    """The newest whole copy as a checkpoint of the folder; None when there is no copy."""
    found: Path | Problem | None = None
    try:
        remote = Remote(copies)
        for copy in remote.copies():
            if copy.manifest is None:
                continue
            checkpoints.set_aside([folder / copy.name])  # it was refused
            found = remote.download(copy, folder)
            if isinstance(found, Path):
                return found
    except PacelineError as error:
        return error.problems[0]
    except OSError as error:
        return Problem(
            code="C014",
            what=f"no copy could be fetched: {error}",
            where=copies,
            fix="see whether there is room in the run's folder",
        )
    return found


def _verify(path: Path, job_digest: str | None) -> Problem | None:
    problem = checkpoints.verify_checkpoint(path)
    manifest = checkpoints.read_manifest(path)
    if problem is not None or isinstance(manifest, Problem):
        return problem
    if None in (job_digest, manifest.job_digest) or job_digest == manifest.job_digest:
        return None
    return Problem(
        code="C010",
        what=f"{path.name} is of another job: its digest is {manifest.job_digest}, this job's "
        f"is {job_digest}",
        where=str(path),
        fix="take it away; to begin with its weights, load them in a program of your own",
    )


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, group: Group = None
) -> None:
    """Load one checkpoint folder as it is, without checking its hashes. Collective.

    Raises:
        CheckpointError: On all ranks alike, when any rank could not; the state may be half loaded.
    """
    entry = CheckpointEntry(step=0, path=path, is_complete=True)
    problem = _try_load(entry, model, optimizer, group)
    if problem is not None:
        raise CheckpointError(problem)


def _try_load(
    entry: CheckpointEntry, model: nn.Module, optimizer: torch.optim.Optimizer, group: Group
) -> Problem | None:
    """Load, and agree whether it worked: None, or the same problem on every rank."""
    saved, reason = attempt(lambda: _saved(entry.path), group)
    if reason is None and saved is not None:
        target, reason = attempt(lambda: make_target(saved, model, optimizer), group)
        if reason is None:
            reason = _check_union(saved, target, group)
        if reason is None and target is not None:
            _, reason = attempt(lambda: _read(entry.path, target, group), group)
            if reason is None:
                _, reason = attempt(lambda: take_over(target, model, optimizer), group)
    if reason is None:
        return None
    return Problem(
        code="C009",
        what=f"{entry.path.name} could not be loaded: {reason}",
        where=str(entry.path),
        fix="use the model it was saved from, or another folder",
    )


def _saved(path: Path) -> Saved:
    metadata: Metadata = FileSystemReader(path).read_metadata()
    return metadata.state_dict_metadata


def _read(path: Path, target: Target, group: Group) -> None:
    state_dict_loader.load(
        target.state,
        storage_reader=FileSystemReader(path),
        planner=LoadPlanner(),
        process_group=group,
    )


def _check_union(saved: Saved, target: Target | None, group: Group) -> str | None:
    """What the checkpoint has and no rank takes; None when all is taken.

    The ranks together, as a pipeline stage has only its own names.
    """
    there = sorted(name for name in saved if "@" not in name)
    here = {} if target is None else target.state
    taken = gather(bytes(name in here for name in there), group)
    for name, *is_taken in zip(there, *taken, strict=True):
        if any(is_taken):
            continue
        if name.startswith(MODEL):
            return f"the checkpoint has {name.removeprefix(MODEL)}, the model has not"
        owner, key, _ = split_optimizer_name(name)
        return (
            f"{key} of {owner} was saved for a matrix that is not here by itself; go on in the "
            "layout it was saved in"
        )
    return None
