"""A run's checkpoints: save by the job's policy, while training goes on, and restore.

`save` stands still until the checkpoint is committed. `start` copies this rank's share to host
memory and returns; a thread writes it, over a process group of its own, and `poll` at the step
boundaries or `wait` at the end tell how it went, on all ranks at the same place. Both write the
same bytes by the same code.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.record import checkpoints
from paceline.runtime.checkpoint._agree import Group
from paceline.runtime.checkpoint._share import Dealer, Part, Share, Stage
from paceline.runtime.checkpoint.restore import Restored, restore_newest
from paceline.runtime.checkpoint.write import (
    Facts,
    OnPhase,
    Saved,
    SaveFailed,
    write_checkpoint,
)
from paceline.runtime.state import named_state
from paceline.spec import CheckpointSpec

Outcome = Saved | SaveFailed


class Checkpointer:
    """The checkpoints of one run. Every method is collective over the group's ranks."""

    def __init__(self, folder: Path, policy: CheckpointSpec, *, group: Group = None) -> None:
        """
        Args:
            folder: Where the checkpoint folders are; made by the first save.
            policy: Which ones are kept.
            group: The ranks that save together; all of them when left out.
        """
        self.folder = folder
        self.policy = policy
        self.group = group
        self._dealer = Dealer()
        self._stage = Stage()
        self._writing: _Writing | None = None
        self._untold: list[Outcome] = []
        self._writers: Group = None
        self._pollers: Group = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        held_out_loss: float | None = None,
        layout: str = "",
        job_digest: str | None = None,
        state_digest: str | None = None,
        loss_scaler: Mapping[str, float] | None = None,
        on_phase: OnPhase | None = None,
    ) -> Saved:
        """Write the state after `step` steps, and return once it is committed.

        A save that was started and still runs is waited for first. Afterwards what the policy does
        not keep is deleted.

        Raises:
            SaveFailed: On all ranks alike, when it could not be written; a later save may work.
        """
        start = time.perf_counter()
        self._finish_writing()
        facts = Facts(
            step=step,
            layout=layout,
            job_digest=job_digest,
            held_out_loss=held_out_loss,
            state_digest=state_digest,
            loss_scaler=loss_scaler,
        )
        path, num_bytes = self._write(self._share(model, optimizer), facts, self.group, on_phase)
        seconds = time.perf_counter() - start
        return Saved(path=path, step=step, num_bytes=num_bytes, stall_s=seconds, write_s=seconds)

    def start(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        held_out_loss: float | None = None,
        layout: str = "",
        job_digest: str | None = None,
        state_digest: str | None = None,
        loss_scaler: Mapping[str, float] | None = None,
        on_phase: OnPhase | None = None,
    ) -> float:
        """Copy the state after `step` steps and write it while training goes on.

        At most one save is on its way: an earlier one is waited for, and its outcome comes with
        the next `poll` or `wait`. Host memory for one more copy of this rank's share is kept.
        `on_phase` is called from the writing thread.

        Returns:
            Seconds that this call took: the stall.
        """
        start = time.perf_counter()
        self._finish_writing()
        self._meet()
        facts = Facts(
            step=step,
            layout=layout,
            job_digest=job_digest,
            held_out_loss=held_out_loss,
            state_digest=state_digest,
            loss_scaler=loss_scaler,
        )
        share = self._stage.copy(self._share(model, optimizer))
        writing = _Writing(
            lambda: self._write(share, facts, self._writers, on_phase), step=step, start=start
        )
        writing.stall_s = time.perf_counter() - start
        writing.begin()
        self._writing = writing
        return writing.stall_s

    def abandon(self) -> SaveFailed | None:
        """Let go of a save that is on its way, at once and without the other ranks.

        For when a rank died and the process groups are gone or about to go. What was written so far
        stays in its `.tmp` folder, which the next save that comes through removes; the save may
        still be committed if that was all that was left to do. The next `start` makes new groups.

        Returns:
            What became of the save, if one was on its way. It does not come again with `poll`.
        """
        writing, self._writing = self._writing, None
        self._writers = self._pollers = None
        self._dealer = Dealer()
        if writing is None:
            return None
        # Its thread may read the copy for a while yet, and would write a mixture.
        self._stage = Stage()
        return SaveFailed(writing.step, "abandoned, as a rank was lost", self.folder)

    def poll(self) -> Outcome | None:
        """How a started save went, once it is through on every rank; None until then, or without.

        Cheap to call after every step: it talks to the other ranks only while a save is on its
        way. A failed save is returned and not raised, as training goes on.
        """
        if not self._untold and self._writing is not None:
            done = torch.tensor(int(self._writing.is_done))
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._pollers)
            if done.item():
                self._finish_writing()
        return self._untold.pop(0) if self._untold else None

    def wait(self) -> Outcome | None:
        """The same, after waiting for a save that is on its way."""
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
            self.folder, model, optimizer, group=self.group, job_digest=job_digest
        )

    def _share(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Part | Any]:
        return self._dealer.own_share(named_state(model, optimizer), self.group)

    def _write(
        self, share: Share, facts: Facts, group: Group, on_phase: OnPhase | None
    ) -> tuple[Path, int]:
        written = write_checkpoint(self.folder, share, facts, group=group, on_phase=on_phase)
        if dist.get_rank(group) == 0:
            self._prune()
        return written

    def _prune(self) -> None:
        """A disk that refuses here costs space, not the checkpoint that was just written."""
        try:
            checkpoints.prune(
                self.folder,
                keep_last=self.policy.keep_last,
                keep_every=self.policy.keep_every,
                keep_best=self.policy.keep_best,
            )
        except OSError:
            return  # tried again after the next save

    def _meet(self) -> None:
        """Groups of their own for the writing threads and for polling, so that neither's messages
        get between those of training. Made by the first `start`, on all ranks."""
        if self._writers is None:
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            self._writers = dist.new_group(ranks, backend="gloo")
            self._pollers = dist.new_group(ranks, backend="gloo")

    def _finish_writing(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._untold.append(writing.outcome())


class _Writing:
    """One save on its way, in a thread that does not keep the process alive."""

    def __init__(self, write: Any, *, step: int, start: float) -> None:
        self.stall_s = 0.0
        self._write = write
        self.step = step
        self._start = start
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"paceline-save-{step}", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> Outcome:
        """Waits for the thread. Raises what it raised, if that was no failure to save."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def _run(self) -> None:
        try:
            path, num_bytes = self._write()
        except SaveFailed as failed:
            self._outcome = failed
        except BaseException as error:  # noqa: BLE001 - the edge of the thread; raised by outcome()
            self._error = error
        else:
            self._outcome = Saved(
                path=path,
                step=self.step,
                num_bytes=num_bytes,
                stall_s=self.stall_s,
                write_s=time.perf_counter() - self._start,
            )
