"""One optimizer step on one rank, as a training function sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.control.slots import Phase
from paceline.errors import RunError
from paceline.parallel.layout import Layout
from paceline.runtime import strategy, vote
from paceline.runtime.devices import is_accelerator
from paceline.runtime.feed import Source, only_ids
from paceline.runtime.phase_clock import PartTimes, own_seconds
from paceline.runtime.recovery.verdict import Verdict
from paceline.runtime.sampling import Ids, Mixture
from paceline.runtime.trainer import Trainer
from paceline.runtime.vote import Outcome, Votes


class Step:
    """One optimizer step on this rank: its samples, their gradients, and the update."""

    def __init__(self, number: int, trainer: Trainer, learning_rate: float) -> None:
        trainer.prepare(number, learning_rate)
        self.number = number
        """From 1."""

        self.learning_rate = learning_rate

        self.loss = 0.0
        """Mean over the global batch, once applied."""

        self.grad_norm = 0.0
        """Global norm before clipping, once applied."""

        self.accuracy: float | None = None
        """Share of the targets that the model had right, where the loss counts them."""

        self.finished = False
        """Whether `apply` was called."""

        self.refused: str | None = None
        """Why all ranks refused to apply it, or None."""

        self.wrong: Verdict | None = None
        """Whose state was found wrong before the update: then the step is computed again."""

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

        self.saves = False
        """Whether all ranks agreed in the vote to save a checkpoint after the step, and stay."""

        self.samples_digest = ""
        self.samples_at: list[int] = []
        """Ids of the micro-batch that was begun last."""

        self.seconds = 0.0
        """The whole step by the host's clock, from its first sample to the update, once applied."""

        self.times = PartTimes()

        self.own_s: float | None = None
        """Seconds of the step in which this rank was not waiting, once applied; None when unknown.
        On an accelerator the forward pass's, where that waits for no other rank."""

        self.own_loss: float | None = None
        """Mean over this rank's own targets, once voted; None where it counts none."""

        self._trainer = trainer
        self._hooks = trainer.hooks
        self._model = trainer.model
        self._optimizer = trainer.optimizer
        # As in `strategy.Losses`.
        self._sums = torch.zeros(4, dtype=torch.float64, device=trainer.device)
        self._expected_targets = 1.0
        self._num_backward = 0
        self._sizes = trainer.layout.micro_batches_of(trainer.meshes.place.data)
        self._num_asked = len(self._sizes)
        self._num_forward = 0
        self._reads_itself = False
        self._buffers = trainer.buffers
        self._buffers_before = [buffer.clone() for buffer in self._buffers.tensors()]
        self._clock = trainer.clock
        self._mark = time.perf_counter()
        self._clock.begin()

    def train(
        self,
        samples: Callable[[Ids], strategy.Batch],
        num_samples: int | Mixture,
        *,
        loss_of: strategy.LossOf = strategy.next_token_loss,
        targets_per_sample: float | None = None,
        ahead: bool = False,
    ) -> None:
        """Every micro-batch of the step, forward and backward: the one call for every layout.

        Layouts that split a sample (context) or the blocks (pipeline) can only be trained so. For
        data, tensor and expert ranks, a loop over `micro_batches` with `backward` does the same.

        Args:
            samples: Ids -> `(inputs, targets)`, whole samples. The model is called with the first.
            num_samples: How many samples the data has; ids run from 0 to `num_samples - 1`. Or
                sources with weights.
            loss_of: `(output, targets)` -> the sum of the losses and over how many targets, and
                with an accuracy how many are right of how many. The step's loss is the sum over the
                global batch, divided by all its targets.
            targets_per_sample: Their mean over the data, where not every token is a target: the
                gradients are divided by it before the real number is known.
            ahead: Whether `samples` depends on the ids alone and may be called in a thread: beside
                an accelerator it then reads the coming micro-batches.
        """
        feed = self._trainer.feed(samples, num_samples, ahead=ahead)
        self.train_on(self._taken(feed), loss_of=loss_of, targets_per_sample=targets_per_sample)

    def train_on(
        self,
        batches: Iterable[strategy.Batch] | Source,
        *,
        loss_of: strategy.LossOf = strategy.next_token_loss,
        uneven: strategy.Uneven | None = None,
        targets_per_sample: float | None = None,
    ) -> None:
        """Micro-batches of the caller's own choice, forward and backward.

        Args:
            batches: This rank's, taken one at a time; or a loader or stream of the session.
            loss_of: As for `train`.
            uneven: Where they are not as many, or as large, as the layout has it.
            targets_per_sample: As for `train`.
        """
        trainer, device = self._trainer, self._trainer.device
        if uneven is not None:
            self._num_asked = uneven.num_micro_batches
        given = batches if isinstance(batches, Iterable) else self._taken(batches)
        losses = strategy.forward_backward(
            self._model,
            trainer.meshes,
            (strategy.on_device(batch, device) for batch in given),
            precision=trainer.precision,
            loss_of=loss_of,
            loss_scale=trainer.loss_scale,
            on_phase=self._enter,
            uneven=uneven,
            targets_per_sample=targets_per_sample,
        )
        self._sums += torch.stack(losses.sums)
        self._expected_targets = losses.expected_targets
        self._num_backward += self._num_asked
        self._enter(None)

    def micro_batches(self, num_samples: int | Mixture) -> Iterator[Ids]:
        """The ids of this rank's samples, one array of `micro_batch` ids at a time.

        A pure function of (seed, step, slot): every sample of the data comes exactly once in an
        epoch, over all ranks together, and a resumed run sees what it would have seen.
        """
        self._reads_itself = True
        return self.batches(self._trainer.feed(only_ids, num_samples))

    def batches(self, source: Source) -> Iterator[Any]:
        """This rank's batches of the step, as `session.loader` or `session.stream` gives them."""
        layout = self._trainer.layout
        check_takes_a_loop(layout, self._trainer.where)
        for index, batch in enumerate(self._taken(source)):
            strategy.set_gradient_sync(
                self._model, layout, is_last=index == layout.accumulation - 1
            )
            self._enter("forward")
            # Around the loss and its backward pass, which are the caller's: tensor ranks compute
            # a cross entropy on their share of the vocabulary.
            with strategy.loss_context(layout):
                yield batch

    def backward(self, loss: torch.Tensor, *, num_targets: float | None = None) -> None:
        """Add the gradient of a micro-batch's mean loss.

        Args:
            num_targets: Over how many targets it is the mean, where micro-batches differ: the
                step's loss is then the mean over all targets of the global batch. Left out, the
                samples of the global batch count alike, also where ranks take unequal numbers.
        """
        self._enter("backward")
        layout, size = self._trainer.layout, self._sizes[self._num_backward % len(self._sizes)]
        if num_targets is None or not size:
            num_targets = size / layout.micro_batch
        self._expected_targets = float(layout.accumulation * layout.data)
        loss_sum = strategy.local_of(loss) * num_targets
        factor = strategy.loss_factor(layout, self._model) * self._trainer.loss_scale
        scaled = loss_sum * (factor / self._expected_targets)
        scaled.backward()  # type: ignore[no-untyped-call]
        if self._trainer.meshes.counts_loss:
            self._sums[0] += loss_sum.detach()
            self._sums[1] += num_targets
        self._num_backward += 1
        self._enter(None)

    def apply(self) -> None:
        """Vote, clip and update: all ranks apply the step, or none does.

        Raises:
            RunError: Not every micro-batch went through `backward`, or the step is applied twice.
        """
        trainer, hooks = self._trainer, self._hooks
        check_complete(
            self.number,
            is_finished=self.finished,
            num_backward=self._num_backward,
            num_asked=self._num_asked,
            where=trainer.where,
        )
        hooks.enter(Phase.VOTE, self._num_forward)
        hooks.pass_by("reduce", self.number)
        strategy.finish_gradients(self._model)
        if "nan" in hooks.pass_by("vote", self.number):
            self._sums[0] = float("nan")
        # Nothing that belongs to the step may be with one rank alone once a rank applies it.
        strategy.send_buffers(self._buffers.tensors(), trainer.meshes)
        norm = strategy.gradient_norm(self._model, trainer.meshes)
        self.has_voted = True
        votes = self._vote(norm)
        self._lap()
        self._clock.voted()
        saves = votes.wishes.save
        self.regroup = ("save" if saves else "go") if votes.wishes.regroup else None
        self.saves = saves and self.regroup is None
        self.wrong = hooks.judge(votes.fingerprints) if votes.fingerprints else None
        if self.wrong is not None:
            hooks.enter(Phase.BOUNDARY, self._num_forward)
            self.undo()
            self.finished = True
            return
        outcome = self._decide(votes)
        hooks.enter(Phase.APPLY, self._num_forward)
        hooks.decided(outcome)
        self.apply_outcome(outcome)
        hooks.enter(Phase.BOUNDARY, self._num_forward)
        own_s = hooks.step_done()
        self._lap()
        self.times = self._clock.end()
        if self._reads_itself:
            self.times = replace(self.times, data_s=None)
        if is_accelerator(trainer.device):
            own_s = own_seconds(self.times, trainer.layout)
        self.own_s = own_s
        hooks.after_update(self.number, self.seconds)

    def apply_outcome(self, outcome: Outcome) -> None:
        """Do what all have agreed on: apply the step, or refuse it. Needs no other rank, where
        `can_roll`."""
        self.stop, self.loss, self.grad_norm = outcome.stop, outcome.loss, outcome.grad_norm
        self.accuracy, self.refused = outcome.accuracy, outcome.refused
        self._hooks.updating()
        if self.refused is None:
            strategy.scale_gradients(self._model, outcome.factor)
            self._hooks.pass_by("apply", self.number)
            self._optimizer.step()
            if not self._trainer.is_element_wise:  # its collectives may have been aborted
                self._hooks.settle(self._trainer.device)
        else:
            self._put_buffers_back()
        if (scaler := self._trainer.scaler) is not None:
            self.overflowed = outcome.is_overflow and not scaler.is_least
            if outcome.is_overflow or self.refused is None:
                scaler.update(found_inf=outcome.is_overflow)
        self._optimizer.zero_grad()
        self._hooks.updated(self.number)
        self.finished = True

    def leave_out(self, reason: str) -> None:
        """Refuse the step without computing it; its samples are not read."""
        self.loss = self.grad_norm = float("nan")
        self.refused, self.finished = reason, True
        self._lap()

    def roll_forward(self, outcome: Outcome) -> None:
        """Apply a step that was interrupted after the vote, in a later generation."""
        self._mark = time.perf_counter()  # the time in between is the recovery's
        self._clock.resume()
        self.apply_outcome(outcome)
        self._lap()
        self.times = self._clock.end()

    @property
    def can_roll(self) -> bool:
        """Whether the update needs no other rank, and the gradients outlive the process groups:
        DDP's lie in its buckets."""
        is_replica = isinstance(self._model, DistributedDataParallel)
        return self._trainer.is_element_wise and not is_replica

    def undo(self) -> None:
        """Give up the step: it can be computed again."""
        self._optimizer.zero_grad()
        self._put_buffers_back()

    def _vote(self, norm: Tensor) -> Votes:
        """What all ranks have seen. One collective, and one wait for the accelerator."""
        trainer = self._trainer
        world_size = trainer.world_size
        sums = vote.ballot(
            self._sums,
            norm,
            rank=trainer.rank,
            world_size=world_size,
            wishes=self._hooks.wishes(),
            fingerprint=self._hooks.fingerprint(),
        )
        if dist.is_initialized():
            dist.all_reduce(sums)
        numbers = torch.cat([sums, norm.view(1), self._sums[:2]])
        # What an aborted sum leaves in its buffer reads like a result.
        self._hooks.settle(trainer.device)
        *totals, own_norm, own_sum, own_targets = numbers.tolist()
        self.own_loss = own_sum / own_targets if own_targets else None
        return vote.counted(totals, norm=own_norm, world_size=world_size)

    def _decide(self, votes: Votes) -> Outcome:
        trainer, scaler = self._trainer, self._trainer.scaler
        refused = vote.reason_to_refuse(
            votes, world_size=trainer.world_size, scale=scaler.factor if scaler else None
        )
        num_targets = votes.num_targets
        mean = self._expected_targets / num_targets / trainer.loss_scale if num_targets else 0.0
        grad_norm = votes.norm * mean
        clip = 1.0 if refused else strategy.clip_factor(grad_norm, trainer.clip_norm)
        return Outcome(
            step=self.number,
            stop=votes.wishes.stop,
            loss=votes.loss_sum / num_targets if num_targets else 0.0,
            grad_norm=grad_norm,
            accuracy=votes.num_right / votes.num_judged if votes.num_judged else None,
            factor=mean * clip,
            refused=refused,
            is_overflow=bool(votes.bad_norms) and not votes.bad_losses,
        )

    def _taken(self, source: Source) -> Iterator[Any]:
        for index in range(self._trainer.layout.accumulation):
            self._clock.enter("data")
            fed = source.take((self.number, index))
            self.samples_digest = fed.digest or self.samples_digest
            self.samples_at = [] if fed.ids is None else fed.ids.tolist()
            self._hooks.see(self.samples_at)
            if fed.error is not None:
                numbers = f", samples {self.samples_at}" if self.samples_at else ""
                fed.error.add_note(f"while step {self.number} read its data{numbers}")
                raise fed.error
            yield fed.batch

    def _enter(self, phase: strategy.Phase | None) -> None:
        """Turn the clock, and let a drill's faults pass by. None is the end of a backward pass."""
        if phase != "loss":  # it counts as a part of the forward pass
            self._clock.enter(phase or "vote")
        if phase == "forward":
            self._hooks.enter(Phase.FORWARD, self._num_forward)
            self._num_forward += 1
        elif phase == "backward":
            self._hooks.enter(Phase.BACKWARD, max(0, self._num_forward - 1))
        if phase == "forward" or phase == "backward":
            self._hooks.pass_by(phase, self.number)

    def _put_buffers_back(self) -> None:
        with torch.no_grad():
            for buffer, before in zip(self._buffers.tensors(), self._buffers_before, strict=True):
                buffer.copy_(before)

    @property
    def loss_sum(self) -> Tensor:
        """Sum of this rank's losses, not divided; 0 on ranks that only repeat another rank's."""
        return self._sums[0]

    @property
    def num_targets(self) -> Tensor:
        """Over how many targets `loss_sum` is."""
        return self._sums[1]

    def _lap(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now


def check_complete(
    number: int, *, is_finished: bool, num_backward: int, num_asked: int, where: str
) -> None:
    """
    Raises:
        RunError: `R024`, a step is applied twice, or before all its micro-batches were computed.
    """
    if is_finished:
        what = f"step {number} was applied twice"
    elif num_backward != num_asked:
        what = f"step {number}: step.backward was called {num_backward} times for "
        what += f"{num_asked} micro-batch{'es' if num_asked > 1 else ''}"
    else:
        return
    raise RunError.of(
        code="R024",
        what=what,
        where=where,
        fix="in every step, go through all of step.micro_batches, call step.backward once "
        "for each, then step.apply once",
    )


def check_takes_a_loop(layout: Layout, where: str) -> None:
    """
    Raises:
        RunError: `R024`, ranks share a sample or the blocks, which a loop cannot train.
    """
    if layout.pipeline == 1 and layout.context == 1:
        return
    axis = "pipeline" if layout.pipeline > 1 else "context"
    raise RunError.of(
        code="R024",
        what=f"layout.{axis} is {getattr(layout, axis)}, and the program goes through "
        "the step's micro-batches itself",
        where=where,
        fix="call step.train(samples, num_samples, loss_of=...), or step.train_on(loader, "
        f"loss_of=...), which work in every layout, or set layout.{axis} to 1",
    )
