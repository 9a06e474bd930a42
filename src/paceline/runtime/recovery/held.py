"""What a worker keeps when its generation ends, and what the ranks of the next hold together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from paceline.runtime.step import Step


class StartOver(Exception):
    """No rank has a state to go on from: all begin at the seed, in the groups they are in."""


class Held:
    """The live state of this worker, and which steps the others' states are of."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.is_torn = False
        """Whether an update has begun and not ended: the state is of no step."""

        self.lost_save = 0
        """Step of a checkpoint that was on its way when the last generation ended; 0 for none."""

        self.applied: list[int] = []
        """By rank: last step that its state has; -1 for a rank without a whole state."""

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """From now on these are the state."""
        self.model, self.optimizer, self.is_torn = model, optimizer, False

    def live(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer, of a rank that has them."""
        assert self.model is not None
        assert self.optimizer is not None
        return self.model, self.optimizer

    def forget(self) -> None:
        """No rank has anything, as in a new run."""
        self.model = self.optimizer = None
        self.is_torn = False
        self.applied = [-1] * len(self.applied)

    def undo(self, step: Step | None) -> None:
        """Take back what an unfinished step has changed besides the parameters."""
        if step is not None and not step.finished and not self.is_torn:
            step.undo()

    def tell(self, last_step: int, device: torch.device) -> None:
        """Say what this rank has, and hear what the others have. Collective."""
        mine = torch.tensor([last_step if self.is_whole else -1, self.lost_save], device=device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        self.applied = [int(step) for step, _ in torch.stack(everyone).tolist()]
        self.lost_save = max(int(step) for _, step in torch.stack(everyone).tolist())

    @property
    def is_whole(self) -> bool:
        """Whether this worker's state is one that training can go on from."""
        return self.model is not None and not self.is_torn

    @property
    def is_anywhere(self) -> bool:
        """Whether any rank has a state from before this generation."""
        return self.newest >= 0

    @property
    def newest(self) -> int:
        """The furthest step that any rank's state has."""
        return max(self.applied, default=-1)
