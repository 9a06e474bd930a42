"""What a worker keeps when its generation ends, and what the ranks of the next hold together."""

import torch
from torch import nn

from paceline.parallel.shrink import Part
from paceline.runtime.checkpoint._all_ranks import gather
from paceline.runtime.recovery.newest import Standing
from paceline.runtime.step import Step
from paceline.runtime.vote import Outcome


class Regrouping(Exception):
    """All ranks leave this generation at this step boundary, as they were asked to."""


class StartOver(Exception):
    """No rank has a state to resume from: all begin at the seed, in the groups they are in."""


class Held:
    """The live state of this worker, and which steps the others' states are of."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.is_torn = False
        """Whether an update has begun and not ended: the state is of no step."""

        self.pending: Step | None = None
        """The step that this rank voted for and could not apply: it has the gradients still."""

        self.decided: Outcome | None = None
        """Outcome of the newest step whose outcome this rank knows."""

        self.part: Part | None = None
        """What of the whole state it is."""

        self.lost_save = 0
        """Step of a checkpoint that was on its way when the last generation ended; 0 for none."""

        self.applied: list[int] = []
        """By rank: last step that its state has; -1 for a rank without a whole state."""

    def hold(self, model: nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> None:
        """From now on these are the state."""
        self.model, self.optimizer, self.is_torn = model, optimizer, False
        self.pending = None
        self.part = part

    def live(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer, of a rank that has them."""
        assert self.model is not None
        assert self.optimizer is not None
        return self.model, self.optimizer

    def forget(self) -> None:
        """No rank has anything, as in a new run."""
        self.model = self.optimizer = self.pending = self.decided = None
        self.is_torn = False
        self.applied = [-1] * len(self.applied)

    def leave(self, step: Step | None) -> None:
        """Keep what an unfinished step has, where it may yet be applied; else take back what it
        has changed besides the parameters."""
        if step is None or step.finished or self.is_torn:
            return
        if step.has_voted and step.can_roll:
            self.pending = step
        else:
            step.undo()

    def drop_if_other_part(self, part: Part) -> None:
        """Forget what this rank has if it is to have another part from now on."""
        if self.part != part:
            self.model = self.optimizer = self.pending = self.decided = None
            self.is_torn = False

    def standing(self, last_step: int) -> Standing:
        """What this rank has, for all to decide from which step to resume."""
        return Standing(
            applied=last_step if self.is_whole else -1,
            next_step=None if self.pending is None else self.pending.number,
            decided=-1 if self.decided is None else self.decided.step,
        )

    def exchange_standing(self, last_step: int, told_step: int) -> int:
        """Report what this rank has, and learn what the others have. Collective, over the host.

        Returns:
            The step whose evaluation and checkpoint all that have a state have seen to: a rank that
            was further than the others sees to them again, with them.
        """
        applied = last_step if self.is_whole else -1
        everyone = gather((applied, self.lost_save, told_step if self.is_whole else None), None)
        self.applied = [step for step, _, _ in everyone]
        self.lost_save = max(step for _, step, _ in everyone)
        return min((step for _, _, step in everyone if step is not None), default=told_step)

    @property
    def is_whole(self) -> bool:
        """Whether this worker's state is one that training can resume from."""
        return self.model is not None and not self.is_torn

    @property
    def is_anywhere(self) -> bool:
        """Whether any rank has a state from before this generation."""
        return self.newest >= 0

    @property
    def newest(self) -> int:
        """The furthest step that any rank's state has."""
        return max(self.applied, default=-1)
