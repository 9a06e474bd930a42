"""One optimizer step on one rank, as a training function sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.control.slots import Phase
from paceline.errors import Problem, RunError
from paceline.runtime import strategy
from paceline.runtime.devices import is_accelerator, pins_memory
from paceline.runtime.optimizer.adamw_8bit import AdamW8bit
from paceline.runtime.phase_clock import PartTimes, PhaseClock, own_seconds
from paceline.runtime.recovery.verdict import Verdict
from paceline.runtime.sampling import Ids, batch_digest, rank_slots, sample_ids

if TYPE_CHECKING:
    from paceline.runtime.session import Session


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there. To an accelerator from pinned memory, so that the host does not wait."""
    if pins_memory(device) and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_ELEMENT_WISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    AdamW8bit,
)
"""Optimizers that update a shard from that shard alone. Adafactor sums over rows and columns, and
Muon over whole matrices: their update communicates."""


class _Votes(NamedTuple):
    """What all ranks have seen of a step."""

    stop: bool
    loss_sum: float
    num_targets: float

    norm: float
    """Of the gradients as they are, on this rank: finite numbers are the same on all."""

    bad_losses: list[int]
    """Ranks whose loss is not finite."""

    bad_norms: list[int]
    """Ranks whose gradients are not finite."""

    wrong: Verdict | None
    """Whose state before this step was found wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all ranks agreed on about a step. A rank applies the step by it, from the gradients as
    they were in the vote."""

    step: int
    stop: bool
    loss: float
    grad_norm: float

    factor: float
    """What gradients are multiplied by: the mean over all targets, the loss scale undone, and
    clipping."""

    refused: str | None

    is_overflow: bool
    """Whether only gradients are not finite."""


class Step:
    """One optimizer step on this rank: its samples, their gradients, and the update."""

    def __init__(
        self,
        number: int,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: float,
        buffers: strategy.SavedBuffers,
        clock: PhaseClock,
    ) -> None:
        self.number = number
        """From 1."""

        self.learning_rate = learning_rate
        """Of this step, already set in the optimizer."""

        self.loss = 0.0
        """Mean over the global batch, once applied."""

        self.grad_norm = 0.0
        """Global norm before clipping, once applied."""

        self.finished = False
        """Whether `apply` was called."""

        self.refused: str | None = None
        """Why all ranks refused to apply it, or None."""

        self.wrong: Verdict | None = None
        """Whose state was found wrong before the update: then the step is done again."""

        self.overflowed = False
        """Whether it was refused because gradients overflowed in fp16, whose loss scale could be
        lowered and is. At its least they are not finite for another reason."""

        self.stop = False
        """Whether some rank was asked to stop, as all ranks agreed in the vote."""

        self.has_voted = False
        """Whether this rank has given its vote: others may have applied the step since."""

        self.regroup: Literal["go", "save"] | None = None
        """Whether all ranks leave this generation after the step, as they agreed in the vote, and
        save a checkpoint first."""

        self.samples_digest = ""
        self.samples_at: list[int] = []
        """Ids of the micro-batch that was begun last."""

        self.seconds = 0.0
        """The whole step by the host's clock, from its first sample to the update, once applied."""

        self.times = PartTimes()
        """Of its parts, once applied."""

        self.own_s: float | None = None
        """Seconds of the step in which this rank was not waiting, once applied; None when unknown.
        On an accelerator the forward pass's, where that waits for no other rank."""

        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=session.place.device)
        self._num_targets = torch.zeros_like(self._loss_sum)
        self._expected_targets = 1.0
        self._num_backward = 0
        self._num_forward = 0
        self._buffers = buffers
        self._buffers_before = [buffer.clone() for buffer in buffers.tensors()]
        self._clock = clock
        self._mark = time.perf_counter()
        clock.begin()

    def train(
        self,
        samples: Callable[[Ids], strategy.Batch],
        num_samples: int,
        *,
        loss_of: strategy.LossOf = strategy.next_token_loss,
    ) -> None:
        """Every micro-batch of the step, forward and backward: the one call for every layout.

        Layouts that split a sample (context) or the blocks (pipeline) can only be trained so. For
        data, tensor and expert ranks, a loop over `micro_batches` with `backward` does the same.

        Args:
            samples: Ids -> `(inputs, targets)`, whole samples. The model is called with the first.
            num_samples: How many samples the data has; ids run from 0 to `num_samples - 1`.
            loss_of: `(output, targets)` -> the sum of the losses and over how many targets. The
                step's loss is the sum over the global batch, divided by all its targets.
        """
        device = self._session.place.device

        def batches() -> Iterator[strategy.Batch]:
            for ids in self._ids(num_samples):
                self._clock.enter("data")
                inputs, targets = samples(ids)
                yield to_device(inputs, device), to_device(targets, device)

        losses = strategy.forward_backward(
            self._model,
            self._session.meshes,
            batches(),
            precision=self._session.precision,
            loss_of=loss_of,
            loss_scale=self._session.loss_scale,
            on_phase=self._enter,
        )
        self._loss_sum += losses.loss_sum
        self._num_targets += losses.num_targets
        self._expected_targets = losses.expected_targets
        self._num_backward += self._session.plan.layout.accumulation
        self._enter(None)

    def micro_batches(self, num_samples: int) -> Iterator[Ids]:
        """The ids of this rank's samples, one array of `micro_batch` ids at a time.

        A pure function of (seed, step, slot): every sample of the data comes exactly once in an
        epoch, over all ranks together, and a resumed run sees what it would have seen.

        Args:
            num_samples: How many samples the data has; ids run from 0 to `num_samples - 1`.
        """
        layout = self._session.plan.layout
        self._check_takes_a_loop()
        for index, ids in enumerate(self._ids(num_samples)):
            strategy.set_gradient_sync(
                self._model, layout, is_last=index == layout.accumulation - 1
            )
            self._enter("forward")
            # Around the loss and its backward pass, which are the caller's: tensor ranks compute
            # a cross entropy on their share of the vocabulary.
            with strategy.loss_context(layout):
                yield ids

    def backward(self, loss: torch.Tensor, *, num_targets: float = 1.0) -> None:
        """Add the gradient of a micro-batch's mean loss.

        Args:
            loss: Its mean.
            num_targets: Over how many targets it is the mean, where micro-batches differ: the
                step's loss is then the mean over all targets of the global batch.
        """
        self._enter("backward")
        layout = self._session.plan.layout
        self._expected_targets = float(layout.accumulation * layout.data)
        loss_sum = strategy.local_of(loss) * num_targets
        factor = strategy.loss_factor(layout, self._model) * self._session.loss_scale
        scaled = loss_sum * (factor / self._expected_targets)
        scaled.backward()  # type: ignore[no-untyped-call]
        if self._session.meshes.counts_loss:
            self._loss_sum += loss_sum.detach()
            self._num_targets += num_targets
        self._num_backward += 1
        self._enter(None)

    def apply(self) -> None:
        """Vote, clip and update: all ranks apply the step, or none does.

        Raises:
            RunError: Not every micro-batch went through `backward`, or the step is applied twice.
        """
        session = self._session
        self._check_complete()
        session.progress.enter(Phase.VOTE, self._num_forward)
        session.faults.pass_by("reduce", self.number)
        strategy.finish_gradients(self._model)
        session.stop_wanted |= session.channel.stop_wanted
        if "nan" in session.faults.pass_by("vote", self.number):
            self._loss_sum.fill_(float("nan"))
        # Nothing that belongs to the step may be with one rank alone once somebody applies it.
        strategy.send_buffers(self._buffers.tensors(), session.meshes)
        norm = strategy.gradient_norm(self._model, session.meshes)
        self.has_voted = True
        votes = self._vote(norm)
        self._lap()
        self._clock.voted()
        self.wrong = votes.wrong
        if self.wrong is not None:
            session.progress.enter(Phase.BOUNDARY, self._num_forward)
            self.undo()
            self.finished = True
            return
        outcome = self._decide(votes)
        session.held.decided = outcome
        session.progress.enter(Phase.APPLY, self._num_forward)
        if outcome.refused is not None:
            session.safekeeping.suspect(self.number)
        session.safekeeping.before_update()
        self.take(outcome)
        session.progress.enter(Phase.BOUNDARY, self._num_forward)
        own_s = session.progress.step_done()
        self._lap()
        self.times = self._clock.end()
        if is_accelerator(session.place.device):
            own_s = own_seconds(self.times, session.plan.layout)
        self.own_s = own_s
        session.safekeeping.after_update(self.number, self.seconds)

    def take(self, outcome: Outcome) -> None:
        """Do what all have agreed on: apply the step, or refuse it. Needs no other rank, where
        `can_roll`."""
        session = self._session
        self.stop, self.loss, self.grad_norm = outcome.stop, outcome.loss, outcome.grad_norm
        self.refused = outcome.refused
        session.held.is_torn = True
        if self.refused is None:
            strategy.scale_gradients(self._model, outcome.factor)
            session.faults.pass_by("apply", self.number)
            self._optimizer.step()
        else:
            self._put_buffers_back()
        if (scaler := session.scaler) is not None:
            self.overflowed = outcome.is_overflow and not scaler.is_least
            if outcome.is_overflow or self.refused is None:
                scaler.update(found_inf=outcome.is_overflow)
        self._optimizer.zero_grad()
        session.last_step = self.number
        session.held.is_torn = False
        session.progress.applied(self.number)
        self.finished = True

    def leave_out(self, reason: str) -> None:
        """Refuse the step without computing it; its samples are not read."""
        self.loss = self.grad_norm = float("nan")
        self.refused, self.finished = reason, True
        self._session.last_step = self.number
        self._lap()

    def roll(self, outcome: Outcome) -> None:
        """Apply a step that was interrupted after the vote, in a later generation."""
        self._mark = time.perf_counter()  # the time in between is the recovery's
        self._clock.resume()
        self.take(outcome)
        self._lap()
        self.times = self._clock.end()

    @property
    def can_roll(self) -> bool:
        """Whether the update needs no other rank, and the gradients outlive the process groups:
        DDP's lie in its buckets."""
        is_replica = isinstance(self._model, DistributedDataParallel)
        return type(self._optimizer) in _ELEMENT_WISE and not is_replica

    def undo(self) -> None:
        """Give up the step: the same can be done again."""
        self._optimizer.zero_grad()
        self._put_buffers_back()

    def _vote(self, norm: Tensor) -> _Votes:
        """What all ranks have seen. One collective, and one wait for the accelerator."""
        session, place = self._session, self._session.place
        world, device = place.world_size, place.device
        sums = torch.zeros(3 + 2 * world, dtype=torch.float64, device=device)
        order = session.channel.regroup_wanted
        # Three counts of ranks in one number, each below the base.
        base = world + 1
        wanted = (session.stop_wanted, order is not None, order is not None and order.save)
        sums[0] = float(sum(base**place for place, flag in enumerate(wanted) if flag))
        sums[1], sums[2] = self._loss_sum, self._num_targets
        sums[3 + place.rank] = ~self._loss_sum.isfinite()
        sums[3 + world + place.rank] = ~norm.isfinite()
        ballot = session.safekeeping.ballot()
        if ballot is not None:
            sums = torch.cat([sums, ballot])
        dist.all_reduce(sums)
        stop, loss_sum, num_targets, *flags, own_norm = torch.cat([sums, norm.view(1)]).tolist()
        bad = [[rank for rank in range(world) if flags[start + rank]] for start in (0, world)]
        wrong = session.safekeeping.judge(flags[2 * world :])
        stops, regroups, saves = (stop // base**each % base > 0 for each in range(3))
        self.regroup = "save" if saves else "go" if regroups else None
        return _Votes(stops, loss_sum, num_targets, own_norm, bad[0], bad[1], wrong)

    def _decide(self, votes: _Votes) -> Outcome:
        session, refused = self._session, self._reason_to_refuse(votes)
        num_targets = votes.num_targets
        mean = self._expected_targets / num_targets / session.loss_scale if num_targets else 0.0
        grad_norm = votes.norm * mean
        clip_norm = session.job.spec.train.clip_norm
        clip = 1.0 if refused else strategy.clip_factor(grad_norm, clip_norm)
        return Outcome(
            step=self.number,
            stop=votes.stop,
            loss=votes.loss_sum / num_targets if num_targets else 0.0,
            grad_norm=grad_norm,
            factor=mean * clip,
            refused=refused,
            is_overflow=bool(votes.bad_norms) and not votes.bad_losses,
        )

    def _reason_to_refuse(self, votes: _Votes) -> str | None:
        if votes.bad_losses:
            return f"the loss is not finite on rank(s) {', '.join(map(str, votes.bad_losses))}"
        if votes.bad_norms:
            scaler = self._session.scaler
            scale = f" (fp16, loss scale {scaler.factor:g})" if scaler is not None else ""
            if len(votes.bad_norms) == self._session.place.world_size:
                return f"the gradient norm is {votes.norm}{scale}"
            ranks = ", ".join(map(str, votes.bad_norms))
            return f"the gradient norm is not finite on rank(s) {ranks}{scale}"
        if not votes.num_targets:
            return "no target of the global batch counts"
        return None

    def _ids(self, num_samples: int) -> Iterator[Ids]:
        session, layout = self._session, self._session.plan.layout
        seed, batch = session.job.spec.train.seed, layout.global_batch
        self.samples_digest = batch_digest(
            self.number - 1, seed=seed, global_batch=batch, num_samples=num_samples
        )
        data_rank = session.meshes.place.data
        for part in rank_slots(data_rank, layout.data, batch, layout.micro_batch):
            ids = sample_ids(
                self.number - 1, part, seed=seed, global_batch=batch, num_samples=num_samples
            )
            self.samples_at = [int(one) for one in ids]
            session.faults.see(self.samples_at)
            yield ids

    def _enter(self, phase: strategy.Phase | None) -> None:
        """Turn the clock, and let a drill's faults pass by. None is the end of a backward pass."""
        if phase != "loss":  # it counts as a part of the forward pass
            self._clock.enter(phase or "vote")
        if phase == "forward":
            self._session.progress.enter(Phase.FORWARD, self._num_forward)
            self._num_forward += 1
        elif phase == "backward":
            self._session.progress.enter(Phase.BACKWARD, max(0, self._num_forward - 1))
        if phase == "forward" or phase == "backward":
            self._session.faults.pass_by(phase, self.number)

    def _check_complete(self) -> None:
        asked = self._session.plan.layout.accumulation
        if self.finished:
            what = f"step {self.number} was applied twice"
        elif self._num_backward != asked:
            what = f"step {self.number}: step.backward was called {self._num_backward} times for "
            what += f"{asked} micro-batch{'es' if asked > 1 else ''}"
        else:
            return
        raise RunError(
            Problem(
                code="R024",
                what=what,
                where=self._session.job.where("program"),
                fix="in every step, go through all of step.micro_batches, call step.backward once "
                "for each, then step.apply once",
            )
        )

    def _check_takes_a_loop(self) -> None:
        layout = self._session.plan.layout
        axis = "pipeline" if layout.pipeline > 1 else "context"
        if layout.pipeline == 1 and layout.context == 1:
            return
        raise RunError(
            Problem(
                code="R024",
                what=f"layout.{axis} is {getattr(layout, axis)}, and the program goes through "
                "step.micro_batches itself",
                where=self._session.job.where("program"),
                fix="call step.train(samples, num_samples, loss_of=...) instead, which works in "
                f"every layout, or set layout.{axis} to 1",
            )
        )

    def _put_buffers_back(self) -> None:
        with torch.no_grad():
            for buffer, before in zip(self._buffers.tensors(), self._buffers_before, strict=True):
                buffer.copy_(before)

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now
