"""Bring back a state: the newest checkpoint that is whole, the same one on every rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import CheckpointError, PacelineError, Problem
from paceline.record import checkpoints
from paceline.record.checkpoints import CheckpointEntry, Manifest
from paceline.record.remote import Remote
from paceline.record.tensors import Place
from paceline.runtime.checkpoint._all_ranks import (
    Group,
    attempt,
    from_first,
    gather,
    threads_for_this_rank,
)
from paceline.runtime.checkpoint._load_plan import Saved, Target, make_target, take_over
from paceline.runtime.checkpoint._read import Found, Reading, Tables, open_tables, read, readings_of
from paceline.runtime.state import DATA, MODEL, split_optimizer_name

_FRESH = Manifest(step=0, world_size=0, files={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a run resumes from."""

    path: Path | None = None
    """The checkpoint that was loaded, or None when there was none: a fresh start."""

    manifest: Manifest = _FRESH
    """The checkpoint's; of step 0 when there was none."""

    refused: list[tuple[Path, Problem]] = field(default_factory=list)
    """Newer checkpoints that were not whole, and why."""

    @property
    def step(self) -> int:
        """Optimizer steps done; 0 when there was no checkpoint."""
        return self.manifest.step


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

    Rank 0 lists the folder; of each candidate, newest first, it checks the manifest, the two tables
    and the sizes of the data files. Then every rank reads its own part and hashes it on the way.
    What no rank reads whole is hashed by one of them, so that every byte is checked. A checkpoint
    that is damaged, or that any rank fails to load, is refused by all. It may have been written by
    any number of ranks in any layout.

    Args:
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
        manifest = from_first(_begin(entry.path, job_digest) if first else None, group)
        if isinstance(manifest, Problem):
            problem: Problem | None = manifest
        else:
            problem = _try_load(entry.path, manifest, model, optimizer, group)
        if problem is None:
            assert isinstance(manifest, Manifest)
            return Restored(path=entry.path, manifest=manifest, refused=refused)
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


def _begin(path: Path, job_digest: str | None) -> Manifest | Problem:
    """The manifest, once it is right and the files are as long as it says."""
    manifest = checkpoints.read_manifest(path)
    if isinstance(manifest, Problem):
        return manifest
    problem = checkpoints.check_outside(path, manifest)
    if problem is not None:
        return problem
    if None in (job_digest, manifest.job_digest) or job_digest == manifest.job_digest:
        return manifest
    return Problem(
        code="C010",
        what=f"{path.name} is of another job: its digest is {manifest.job_digest}, this job's "
        f"is {job_digest}",
        where=str(path),
        fix="take it away; to begin with its weights, load them in your own program",
    )


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, group: Group = None
) -> None:
    """Load one checkpoint folder as it is, without checking its hashes. Collective.

    Raises:
        CheckpointError: On all ranks alike, when any rank could not; the state may be half loaded.
    """
    problem = _try_load(path, None, model, optimizer, group)
    if problem is not None:
        raise CheckpointError(problem)


def _try_load(
    path: Path,
    manifest: Manifest | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
) -> Problem | None:
    """Load, and agree whether it worked: None, or the same problem on every rank."""
    target, found = None, None
    tables, reason = attempt(lambda: open_tables(path, manifest), group)
    if reason is None and tables is not None:
        target, reason = attempt(lambda: make_target(tables.saved, model, optimizer), group)
        if reason is None:
            reason = _check_union(tables.saved, target, group)
        if reason is None and target is not None:
            found, reason = _read(path, tables, target, group)
    if reason is None and found is not None and target is not None:
        damaged = sorted(set().union(*gather(found.damaged, group)))
        if damaged:
            is_first = dist.get_rank(group) == 0
            return from_first(_name(path, manifest, damaged) if is_first else None, group)
        target.state.update(found.values)
        _, reason = attempt(lambda: take_over(target, model, optimizer), group)
    if reason is None:
        return None
    return Problem(
        code="C009",
        what=f"{path.name} could not be loaded: {reason}",
        where=str(path),
        fix="use the model it was saved from, or another folder",
    )


def _read(
    path: Path, tables: Tables, target: Target, group: Group
) -> tuple[Found | None, str | None]:
    readings, reason = attempt(lambda: readings_of(target.state, tables.metadata), group)
    if reason is not None or readings is None:
        return None, reason
    places = sorted(tables.hashes)
    mine = {each.place for each in readings if each.is_whole}
    flags = gather(bytes(place in mine for place in places), group)
    rest = _share_of_rest(places, flags, dist.get_rank(group))
    threads = threads_for_this_rank(group)
    wanted = [*readings, *(Reading(file=file, start=at, length=n) for file, at, n in rest)]
    return attempt(lambda: read(path, wanted, tables.hashes, threads=threads), group)


def _share_of_rest(places: Sequence[Place], flags: Sequence[bytes], rank: int) -> list[Place]:
    """What one rank hashes of the places that no rank reads whole: about as many bytes as the
    others, what each reads anyway counted.

    Args:
        flags: By rank, 1 for each place that it reads whole.
        rank: Whose share.

    >>> _share_of_rest([("a", 0, 9), ("a", 9, 5), ("b", 0, 4)], [b"\\1\\0\\0", b"\\0\\0\\0"], 1)
    [('a', 9, 5), ('b', 0, 4)]
    """
    load = [
        sum(place[2] for place, is_read in zip(places, row, strict=True) if is_read)
        for row in flags
    ]
    rest = [place for place, *is_read in zip(places, *flags, strict=True) if not any(is_read)]
    share = []
    for place in sorted(rest, key=lambda place: (-place[2], place)):
        least = min(range(len(load)), key=load.__getitem__)
        load[least] += place[2]
        if least == rank:
            share.append(place)
    return share


def _name(path: Path, manifest: Manifest | None, damaged: Sequence[str]) -> Problem:
    """What is wrong with the first of some files that a rank did not read as they were written."""
    if manifest is not None:
        for file in damaged:
            problem = checkpoints.check_file(path, file, manifest)
            if problem is not None:
                return problem
    return Problem(
        code="C005",
        what=f"{damaged[0]} in {path.name} was read as something else than was written; read again "
        "it is right",
        where=str(path / damaged[0]),
        fix="an earlier checkpoint is used, if one is whole; look at the health of disk and memory",
    )


def _check_union(saved: Saved, target: Target | None, group: Group) -> str | None:
    """What the checkpoint has and no rank takes; None when all is taken.

    The ranks together, as a pipeline stage has only its own names.
    """
    there = sorted(name for name in saved if "@" not in name and not name.startswith(DATA))
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
