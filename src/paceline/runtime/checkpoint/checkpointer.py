"""A run's checkpoints: save by the job's policy, while training goes on, and restore.

`save` stands still until the checkpoint is committed. `start` copies this rank's share to memory
that its writer process reads, and returns; `poll` at the step boundaries or `wait` at the end tell
how it went, on all ranks at the same place. Both write the same bytes by the same code.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from paceline.job import CheckpointSpec
from paceline.record.events import CheckpointCopied, CheckpointCopyFailed
from paceline.runtime.checkpoint._all_ranks import Group, gather
from paceline.runtime.checkpoint._files import CopyPolicy, KnownFacts, WriteTask
from paceline.runtime.checkpoint._process import OnPhase, Pending, writer_process
from paceline.runtime.checkpoint._save_plan import SavePlan, SavePlanner, manifest_of
from paceline.runtime.checkpoint.restore import Restored, restore_newest
from paceline.runtime.checkpoint.write import (
    PartOutcome,
    Saved,
    SaveFailed,
    failure_of,
    write_together,
)
from paceline.runtime.state import named_state

Outcome = Saved | SaveFailed

_LIMIT_S = 1800.0
"""How long a save may take once training waits for it; then its writers are ended and it has
failed. A guess: a share of 180 GB at 100 MB/s."""

_LOOK_S = 0.02
"""Between two looks at the other ranks while waiting. A guess: short beside an fsync."""

_ORDERLY_S = 10.0
"""For rank 0's writer to remove what a failed save left. A guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    """One save on its way."""

    task: WriteTask
    pending: Pending
    start: float
    stall_s: float


class Checkpointer:
    """The checkpoints of one run. Every method but `abandon` is collective over the group."""

    def __init__(
        self,
        folder: Path,
        policy: CheckpointSpec,
        *,
        group: Group = None,
        opening: Callable[[], AbstractContextManager[None]] = nullcontext,
        others: Callable[[int], Mapping[str, Any]] = lambda step: {},
    ) -> None:
        """Args:
        policy: Which ones are kept.
        opening: Around what makes a process group, so that it can be interrupted.
        others: What this rank has saved with the state after a step, by name.
        """
        self.folder = folder
        self.policy = policy
        self.group = group
        self._opening = opening
        self._others = others
        self._planner = SavePlanner()
        self._writing: _Writing | None = None
        self._untold: list[Outcome] = []
        self._pollers: Group = None
        self._has_pollers = False

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        on_phase: OnPhase | None = None,
        **facts: Unpack[KnownFacts],
    ) -> Saved:
        """Write the state after `step` steps, and return once it is committed.

        A save that was started and still runs is waited for first. Afterwards what the policy does
        not keep is deleted.

        Raises:
            SaveFailed: On all ranks alike, when it could not be written; a later save may work.
        """
        start = time.perf_counter()
        self._finish_writing()
        plan = self._plan(step, model, optimizer)
        task = self._task(step, plan, facts)
        num_bytes = write_together(task, plan, group=self.group, on_phase=on_phase)
        seconds = time.perf_counter() - start
        return Saved(
            path=task.final,
            step=step,
            num_bytes=num_bytes,
            stall_s=seconds,
            write_s=seconds,
        )

    def start(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        on_phase: OnPhase | None = None,
        **facts: Unpack[KnownFacts],
    ) -> float:
        """Copy the state after `step` steps and have it written while training goes on.

        At most one save is on its way: an earlier one is waited for, and its outcome comes with
        the next `poll` or `wait`. Host memory for one more copy of this rank's share is kept. The
        first save starts this rank's writer process. `on_phase` is called from another thread.

        Returns:
            Seconds that this call took: the stall.
        """
        start = time.perf_counter()
        self._finish_writing()
        plan = self._plan(step, model, optimizer)
        task = self._task(step, plan, facts)
        pending = writer_process().submit(task, plan, on_phase)
        stall_s = time.perf_counter() - start
        self._writing = _Writing(task=task, pending=pending, start=start, stall_s=stall_s)
        return stall_s

    def abandon(self) -> SaveFailed | None:
        """Let go of a save that is on its way, at once and without the other ranks.

        For when a rank died and the process groups are gone or about to go. What was written so far
        stays in its `.tmp` folder, which the next save that comes through removes; the save may
        still be committed, whole, if that was all that was left to do. The writer process stays,
        and the next `start` goes on with it.

        Returns:
            What became of the save, if one was on its way. It does not come again with `poll`.
        """
        writing, self._writing = self._writing, None
        self._pollers, self._has_pollers = None, False
        self._planner = SavePlanner()
        if writing is None:
            return None
        writer_process().abandon()
        return SaveFailed(writing.task.manifest.step, "abandoned, as a rank was lost", self.folder)

    def poll(self) -> Outcome | None:
        """How a started save went, once it is through on every rank; None until then, or without.

        Cheap to call after every step: it talks to the other ranks only while a save is on its
        way. A failed save is returned and not raised, as training goes on.
        """
        if self._writing is not None and self._is_settled(self._writing):
            self._settle()
        return self._untold.pop(0) if self._untold else None

    def wait(self) -> Outcome | None:
        """How a started save went, after waiting for one that is on its way."""
        self._finish_writing()
        return self._untold.pop(0) if self._untold else None

    def restore_newest(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        job_digest: str | None = None,
    ) -> Restored:
        """The newest valid checkpoint, loaded; see `restore.restore_newest`."""
        self._finish_writing()
        return restore_newest(
            self.folder,
            model,
            optimizer,
            group=self.group,
            job_digest=job_digest,
            copies=self.copies,
        )

    @property
    def copies(self) -> str | None:
        """URL of this run's copies: runs that share a storage do not share checkpoints."""
        if self.policy.copy_to is None:
            return None
        return f"{self.policy.copy_to.rstrip('/')}/{self.folder.parent.name}"

    def take_copies(self) -> list[CheckpointCopied | CheckpointCopyFailed]:
        """What became of copies to the other storage since it was last asked. Not collective; only
        rank 0's writer copies, and one that failed is tried again after the next save."""
        return writer_process().take_copies()

    def wait_for_copies(self) -> None:
        """Return once this rank's writer copies nothing any more. Not collective."""
        writer_process().wait_for_copies()

    def _plan(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> SavePlan:
        state = {**named_state(model, optimizer), **self._others(step)}
        return self._planner.plan_save(state, self.group)

    def _task(self, step: int, plan: SavePlan, facts: KnownFacts) -> WriteTask:
        policy = self.policy
        return WriteTask(
            folder=self.folder,
            manifest=manifest_of(step, dist.get_world_size(self.group), facts),
            attempt=plan.attempt,
            rank=dist.get_rank(self.group),
            num_bytes=plan.num_bytes,
            keep={
                "keep_last": policy.keep_last,
                "keep_every": policy.keep_every,
                "keep_best": policy.keep_best,
            },
            copy_to=None
            if self.copies is None
            else CopyPolicy(url=self.copies, keep=policy.copy_keep, compress=policy.compress),
        )

    def _finish_writing(self) -> None:
        """Wait for a save that is on its way. All ranks look together, so that one which failed
        ends the waiting of all."""
        while self._writing is not None:
            writing = self._writing
            writing.pending.wait(_LOOK_S)
            if self._is_settled(writing):
                self._settle()
            elif time.perf_counter() - writing.start > _LIMIT_S:
                writer_process().kill()  # its save has failed, and the next look finds it so

    def _is_settled(self, writing: _Writing) -> bool:
        """Whether every rank's writer is through, or one has failed. Collective."""
        ended = writing.pending.ended
        through, well = ended is not None, ended is None or ended.reason is None
        least = torch.tensor([int(through), int(well)])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._polling_group())
        all_through, all_well = least.tolist()
        return bool(all_through or not all_well)

    def _settle(self) -> None:
        """Hear from all ranks how the save went, and note it. Collective."""
        writing = self._writing
        assert writing is not None
        ended = writing.pending.ended
        mine = PartOutcome()
        if ended is not None:
            seconds = writing.pending.ended_at - writing.start
            mine = PartOutcome(
                reason=ended.reason,
                is_space=ended.is_space,
                num_bytes=ended.num_bytes,
                seconds=seconds,
            )
        parts = gather(mine, self.group)
        task, failed = writing.task, failure_of(writing.task, parts)
        self._writing = None
        if failed is not None:
            writer_process().abandon()
            if task.rank == 0:  # its writer removes what was written, and says so
                writing.pending.wait(_ORDERLY_S)
            dist.barrier(self._polling_group())
            self._untold.append(failed)
            return
        self._untold.append(
            Saved(
                path=task.final,
                step=task.manifest.step,
                num_bytes=parts[0].num_bytes,
                stall_s=writing.stall_s,
                write_s=parts[0].seconds,
            )
        )

    def _polling_group(self) -> Group:
        """The group where it can send what lies in host memory, else one that can. Made once."""
        if not self._has_pollers:
            self._has_pollers = True
            self._pollers = self.group
            if "gloo" not in str(dist.get_backend_config(self.group)):
                ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
                with self._opening():
                    self._pollers = dist.new_group(ranks, backend="gloo")
        return self._pollers
