"""A run's checkpoints: save by the job's policy, restore the newest valid one."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline.record import checkpoints
from paceline.runtime.checkpoint._agree import Group
from paceline.runtime.checkpoint._share import own_share
from paceline.runtime.checkpoint.restore import Restored, restore_newest
from paceline.runtime.checkpoint.write import Facts, OnPhase, Saved, write_checkpoint
from paceline.runtime.state import named_state
from paceline.spec import CheckpointSpec


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
        on_phase: OnPhase | None = None,
    ) -> Saved:
        """Write the state after `step` steps and prune what the policy does not keep.

        Raises:
            SaveFailed: On all ranks alike, when it could not be written; a later save may work.
        """
        start = time.perf_counter()
        facts = Facts(
            step=step,
            layout=layout,
            job_digest=job_digest,
            held_out_loss=held_out_loss,
            state_digest=state_digest,
        )
        rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
        share = own_share(named_state(model, optimizer), rank, world)
        path, num_bytes = write_checkpoint(
            self.folder, share, facts, group=self.group, on_phase=on_phase
        )
        self._prune()
        seconds = time.perf_counter() - start
        return Saved(path=path, step=step, num_bytes=num_bytes, stall_s=seconds, write_s=seconds)

    def restore_newest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Restored:
        """The newest valid checkpoint, loaded; see `restore.restore_newest`."""
        return restore_newest(self.folder, model, optimizer, group=self.group)

    def _prune(self) -> None:
        """Rank 0 alone; a disk that refuses costs space, not the checkpoint just written."""
        if dist.get_rank(self.group) != 0:
            return
        try:
            checkpoints.prune(
                self.folder,
                keep_last=self.policy.keep_last,
                keep_every=self.policy.keep_every,
                keep_best=self.policy.keep_best,
            )
        except OSError:
            return  # tried again after the next save
