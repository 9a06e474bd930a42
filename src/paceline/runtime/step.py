"""One optimizer step on one rank, as a training function sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from paceline.errors import Problem, RunError
from paceline.runtime import strategy
from paceline.runtime.sampling import batch_digest, rank_slots, sample_ids

if TYPE_CHECKING:
    from paceline.runtime.session import Session


class Step:
    """One optimizer step on this rank: its samples, their gradients, and the update."""

    def __init__(
        self,
        number: int,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: float,
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

        self.stop = False
        """Whether some rank was asked to stop, as all ranks agreed in the vote."""

        self.samples_digest = ""
        self.forward_s = self.backward_s = self.vote_s = self.apply_s = 0.0
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._loss = torch.zeros((), dtype=torch.float64, device=session.place.device)
        self._num_backward = 0
        self._buffers = strategy.saved_buffers(model)
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        self._mark = time.perf_counter()

    def micro_batches(self, num_samples: int) -> Iterator[np.ndarray]:
        """The ids of this rank's samples, one array of `micro_batch` ids at a time.

        A pure function of (seed, step, slot): every sample of the data comes exactly once in an
        epoch, over all ranks together, and a resumed run sees what it would have seen.

        Args:
            num_samples: How many samples the data has; ids run from 0 to `num_samples - 1`.
        """
        session, layout = self._session, self._session.plan.layout
        seed, batch = session.job.spec.train.seed, layout.global_batch
        slots = rank_slots(session.place.rank, layout.data, batch, layout.micro_batch)
        self.samples_digest = batch_digest(
            self.number - 1, seed=seed, global_batch=batch, num_samples=num_samples
        )
        for index, part in enumerate(slots):
            strategy.set_gradient_sync(self._model, layout, is_last=index == len(slots) - 1)
            session.faults.pass_by("forward", self.number)
            yield sample_ids(
                self.number - 1, part, seed=seed, global_batch=batch, num_samples=num_samples
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss.

        Micro-batches and ranks have the same number of samples, so the mean of their means is
        the mean over the global batch.
        """
        self.forward_s += self._lap()
        self._session.faults.pass_by("backward", self.number)
        scaled = loss / self._session.plan.layout.accumulation
        scaled.backward()  # type: ignore[no-untyped-call]
        self._loss += scaled.detach()
        self._num_backward += 1
        self.backward_s += self._lap()

    def apply(self) -> None:
        """Vote, clip and update: all ranks apply the step, or none does.

        Raises:
            RunError: Not every micro-batch went through `backward`, or the step is applied twice.
        """
        session = self._session
        self._check_complete()
        session.stop_wanted |= session.channel.stop_wanted
        train, place = session.job.spec.train, session.place
        norm = strategy.gradient_norm(self._model)
        norm_value, loss_value = float(norm), float(self._loss)
        bad = [0.0] * place.world_size
        bad[place.rank] = float(not math.isfinite(loss_value))
        stop, loss_sum, norms_bad, *losses_bad = session.vote(
            float(session.stop_wanted),
            loss_value,
            float(not math.isfinite(norm_value)),
            *bad,
        )
        self.stop = stop > 0
        self.loss, self.grad_norm = loss_sum / place.world_size, norm_value
        self.vote_s = self._lap()
        ranks = [rank for rank, flag in enumerate(losses_bad) if flag]
        if ranks:
            self.refused = f"the loss is not finite on rank(s) {', '.join(map(str, ranks))}"
        elif norms_bad:
            self.refused = f"the gradient norm is {norm_value}"
        else:
            if train.clip_norm is not None:
                strategy.scale_gradients(self._model, norm, train.clip_norm)
            session.faults.pass_by("apply", self.number)
            self._optimizer.step()
        self._optimizer.zero_grad()
        self._settle_buffers()
        self.apply_s = self._lap()
        self.finished = True

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

    def _settle_buffers(self) -> None:
        """The same buffers on every rank; after a refused step those from before it."""
        if self.refused is None:
            strategy.send_buffers(self._buffers)
            return
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._buffers_before, strict=True):
                buffer.copy_(before)

    @property
    def seconds(self) -> float:
        """The whole step, from its first sample to the update."""
        return self.forward_s + self.backward_s + self.vote_s + self.apply_s

    def _lap(self) -> float:
        now = time.perf_counter()
        self._mark, lap = now, now - self._mark
        return lap
