"""The evaluation loss: measured on every rank alike, and what follows from it, the best checkpoint
and an early end.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.control.slots import Phase
from paceline.errors import JobError
from paceline.job.evaluate_rules import num_best
from paceline.record import events as log
from paceline.runtime import strategy
from paceline.runtime.checkpoint._all_ranks import from_first
from paceline.runtime.generation import Generation

Share = tuple[Tensor | float, ...]
"""This rank's share of the evaluation loss: the sum over its targets, how many they were, and,
where there is an accuracy, how many targets the model has right, and of how many."""

Evaluate = Callable[[], Share | Mapping[str, Share]]
"""This rank's share, or its share of each source's."""


class Evaluation:
    """When a run is evaluated, and how it stands."""

    def __init__(
        self,
        here: Generation,
        model: nn.Module,
        evaluate: Evaluate | None,
        source_weights: Mapping[str, float],
    ) -> None:
        spec = here.job.spec
        self._here = here
        self._model = model
        self._evaluate = evaluate
        self._weights = source_weights
        self._every, self._last = here.plan.evaluate_every, spec.train.steps
        self._outputs_every = spec.evaluate.outputs_every
        self._patience, self._min_delta = spec.evaluate.patience, spec.evaluate.min_delta
        self._measured_step: int | None = None
        self.counts_best = evaluate is not None and num_best(spec) > 0
        """Whether the best checkpoint is kept."""

    def check(self) -> None:
        """
        Raises:
            JobError: The job stops early by evaluations, and the program makes none.
        """
        if self._patience is not None and self._evaluate is None:
            raise JobError.of(
                code="J007",
                what=f"evaluate.patience is {self._patience}, and the program evaluates nothing",
                where=self._here.job.where("evaluate.patience"),
                fix="call session.steps(model, optimizer, evaluate=...), or leave it out",
            )

    def is_due(self, number: int) -> bool:
        """Whether a step is followed by an evaluation."""
        return self._evaluate is not None and (number % self._every == 0 or number == self._last)

    def is_kept_for_outputs(self, number: int) -> bool:
        """Whether the model after this step is to do prompts and tasks, once the run is over."""
        every = self._outputs_every
        return every is not None and number % every == 0

    def is_best(self, number: int) -> bool:
        """Whether the loss after this step is the lowest so far, and its checkpoint to be kept."""
        return self.counts_best and self._here.state.best.step == number

    def is_over(self) -> bool:
        """Whether the run ends before its last step; the same on every rank."""
        return self._patience is not None and self._here.state.best.waited >= self._patience

    def loss_after(self, number: int) -> float | None:
        """The loss measured after this very step: keep-best is for weights that were measured."""
        return self._here.state.held_out_loss if self._measured_step == number else None

    def measure(self, number: int) -> None:
        """Evaluate after a step, and record it. Collective."""
        if self._evaluate is None:
            return
        here, state, plan = self._here, self._here.state, self._here.plan
        start = time.perf_counter()
        here.progress.enter(Phase.EVALUATE)
        self._model.eval()
        with torch.no_grad(), strategy.autocast(plan.precision, here.place.device, plan.layout):
            shares = self._evaluate()
        self._model.train()
        by_source = shares if isinstance(shares, Mapping) else {"": shares}
        own = [float(number) for share in by_source.values() for number in share]
        sums = here.all_reduce_sum(*own)
        width = len(own) // len(by_source)
        loss_sums, counts, *judged = (sums[start::width] for start in range(width))
        weights = [self._weights.get(name, 0.0) for name in by_source]
        state.held_out_loss = mean_of(loss_sums, counts, weights)
        each = zip(by_source, loss_sums, counts, strict=True)
        losses: dict[str, float | None] = {name: total / num for name, total, num in each if num}
        self._count(number, state.held_out_loss)
        self._measured_step = number
        here.progress.enter(Phase.BOUNDARY)
        seconds = time.perf_counter() - start
        here.report(
            log.Evaluated(
                step=number,
                loss=state.held_out_loss,
                seconds=seconds,
                by_source=losses if len(losses) > 1 else {},
                accuracy=mean_of(judged[0], judged[1], weights)
                if judged and any(judged[1])
                else None,
            )
        )

    def _count(self, number: int, loss: float) -> None:
        """Compare with the evaluations before. Rank 0's answer is everybody's, as an evaluation
        that is repeated after a failure may differ in its last bits. Collective."""
        if self.counts_best:
            best = self._here.state.best.after(number, loss, min_delta=self._min_delta)
            self._here.state.best = from_first(best, None)

    def report_early_end(self) -> None:
        """Record that the run ended before its last step, and what was best."""
        state, best = self._here.state, self._here.state.best
        self._here.report(
            log.StoppedEarly(
                step=state.last_step,
                waited=best.waited,
                best_step=best.step,
                best_loss=best.loss,
            )
        )


def mean_of(sums: Sequence[float], counts: Sequence[float], weights: Sequence[float]) -> float:
    """The mean over all targets; of sources with weights, that of their means by weight.

    >>> mean_of([20.0, 600.0], [10.0, 100.0], [3.0, 1.0])
    3.0
    """
    found = zip(weights, sums, counts, strict=True)
    known = [(weight, total / num) for weight, total, num in found if num and weight]
    if len(sums) > 1 and known:
        return sum(weight * mean for weight, mean in known) / sum(weight for weight, _ in known)
    return sum(sums) / sum(counts)
