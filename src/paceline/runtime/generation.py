"""What the parts of a run's step loop have in common: where a rank stands, and what is around it.

A session makes both. Its loop, the hooks of its steps and its safekeeping are given them, so that
none of these knows the session, or another's insides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paceline.control import messages as say
from paceline.job import Job
from paceline.plan import Plan
from paceline.plan.advice import scale_learning_rate
from paceline.record import events as log
from paceline.record.best import Best
from paceline.record.metrics import StepMetrics
from paceline.record.run import RunFolder
from paceline.runtime import strategy
from paceline.runtime.batches import Batches
from paceline.runtime.channel import Line
from paceline.runtime.faults import Faults
from paceline.runtime.logged import Logged
from paceline.runtime.progress import Progress
from paceline.runtime.recovery.held import Held
from paceline.runtime.recovery.member import Membership, Place
from paceline.runtime.step import Step


@dataclass(slots=True, kw_only=True)
class RunState:
    """Where this rank stands in the run. It outlives a generation."""

    scaler: strategy.LossScaler | None
    """Keeps the gradients inside fp16's range; None in other precisions."""

    batches: Batches
    """Sizes of the global batches of the steps up to this state, and of those to come."""

    interrupted: bool = False
    """Whether the run stopped at a step boundary because somebody asked."""

    stop_wanted: bool = False
    """Whether this rank wants the run to stop at the next step boundary."""

    last_step: int = 0
    """Last finished step, also of the state that was resumed from."""

    told_step: int = 0
    """Last step whose evaluation and checkpoint, where they were due, have been seen to."""

    saved_step: int = 0
    held_out_loss: float | None = None
    best: Best = field(default_factory=Best)
    """The best evaluation so far; counted where early stopping or the best checkpoint needs it."""

    refused_in_a_row: int = 0
    """Steps that were refused, one after the other, up to the last."""

    newest_line: StepMetrics | None = None
    step: Step | None = None
    logged: Logged = field(default_factory=Logged)
    """What the training function has logged in it."""

    def state_dict(self) -> dict[str, Any]:
        """What goes with the model's and the optimizer's state to a rank that lacks it."""
        return {
            "last_step": self.last_step,
            "told_step": self.told_step,
            "saved_step": self.saved_step,
            "held_out_loss": self.held_out_loss,
            "best": self.best,
            "refused_in_a_row": self.refused_in_a_row,
            "newest_line": self.newest_line,
            "batches": self.batches.changes,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another rank's `state_dict` gave."""
        self.load_scaler(state.pop("scaler"))
        self.batches.changes = state.pop("batches")
        for name, value in state.items():
            setattr(self, name, value)

    def load_scaler(self, state: Any) -> None:
        """Take over a loss scaler's state, where there is one and it is known."""
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What surrounds the steps of this rank, from one meeting of the ranks to the next."""

    job: Job
    plan: Plan
    run: RunFolder
    line: Line
    member: Membership
    progress: Progress
    faults: Faults
    held: Held
    state: RunState
    place: Place
    meshes: strategy.Meshes
    on_step: Callable[[Step], None]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs."""
        return self.place.rank == 0

    def report(self, event: log.Reported) -> None:
        """Send what all ranks have found out to the run's record, from the first rank."""
        if self.is_first:
            self.line.send(say.ForRecord(event=event))

    def settle(self) -> None:
        """Wait for this rank's device, and be sure that all it was to receive until now has come.
        Nothing on the host follows from a device before that."""
        self.member.settle(self.place.device)

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Sums over all ranks; every rank gets the same numbers."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.place.device)
        dist.all_reduce(sums)
        self.settle()
        return [float(value) for value in sums.tolist()]


def begin_batches(here: Generation, optimizer: torch.optim.Optimizer) -> float:
    """The steps after the state that was restored have the batch of this generation's layout.

    Returns:
        What their learning rates are multiplied by: 1 at the planned batch.
    """
    batches, step = here.state.batches, here.state.last_step + 1
    before, size = (
        batches.size(step - 1) if step > 1 else batches.first,
        here.plan.layout.global_batch,
    )
    batches.begin(step, size)
    # The program's own optimizer may be another than the job's.
    kind = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw"
    rate = scale_learning_rate(1.0, base_batch=batches.first, batch=size, optimizer=kind)
    if size != before:
        here.report(
            log.BatchChanged(
                step=step,
                global_batch=size,
                before=before,
                samples=batches.start(step),
                rate_factor=rate.learning_rate,
                rule=rate.rule,
            )
        )
    return rate.learning_rate
