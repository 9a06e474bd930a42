"""The gradients of one optimizer step, in any layout: every micro-batch forward and backward.

The loss is normalised by targets over the whole global batch. A micro-batch's loss is the sum over
its targets divided by the number of targets that the global batch is expected to have, and all
reductions over ranks are sums. Where targets are missing (padding), the real number is known once
all ranks have counted: the gradients are then multiplied by expected / real, together with the
clipping.

Letters in tensor names: B samples in a micro-batch, S tokens in a sample, V size of the vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.choices import Precision
from paceline.runtime.devices import to_device
from paceline.runtime.strategy.chunked import IGNORED as IGNORED
from paceline.runtime.strategy.chunked import in_chunks
from paceline.runtime.strategy.context.documents import Documents, check_asked, kept_apart
from paceline.runtime.strategy.context.split import keep_apart
from paceline.runtime.strategy.context.tokens import local_tokens
from paceline.runtime.strategy.data.shard import (
    finish_gradients,
    free_gathered,
    loss_factor,
    set_gradient_sync,
)
from paceline.runtime.strategy.expert.balance import balanced
from paceline.runtime.strategy.mesh import Meshes
from paceline.runtime.strategy.pipeline import pipeline
from paceline.runtime.strategy.precision import autocast
from paceline.runtime.strategy.tensor.split import loss_context

Batch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""`(inputs_BS, targets_BS)` of one micro-batch, whole samples: every rank of a context, tensor or
pipeline group has the same ones. Where documents in a sample do not see each other, `ends_BE` is
beside them: where each document ends, int32, filled up with S."""

LossOf = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | int] | tuple[Tensor, ...]]
"""`(output, targets)` -> the sum of the losses, and over how many targets it is, or the sum of
their weights; from a loss with an accuracy also how many targets the model has right, and of how
many."""

Phase = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Losses as this rank has seen them; the sums over all ranks are the global batch's.

    Zero on ranks that only repeat another rank's: all stages but the last, all but the first of
    the tensor ranks.
    """

    loss_sum: Tensor
    """A float64 number, not yet divided."""

    num_targets: Tensor
    """A float64 number: the targets that count, or the sum of their weights."""

    num_right: Tensor
    """A float64 number: those that the model has right, from a loss with an accuracy; else 0."""

    num_judged: Tensor
    """A float64 number: of how many targets `num_right` are right; 0 without an accuracy."""

    expected_targets: float
    """What the gradients are divided by: targets of the global batch when none is missing."""

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """The four numbers, in this order."""
        return self.loss_sum, self.num_targets, self.num_right, self.num_judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """A step whose micro-batches are not the layout's, as at the end of an epoch."""

    num_micro_batches: int
    """On every rank alike."""

    num_targets: float
    """Targets of the whole step, over all ranks."""


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The micro-batch where the model is; where documents end stays in host memory."""
    inputs_BS, targets_BS, *ends = batch
    return to_device(inputs_BS, device), to_device(targets_BS, device), *ends  # type: ignore[return-value]


def next_token_loss(
    logits_BSV: Tensor, targets_BS: Tensor, weights_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies in float32, and the number of targets that are not `IGNORED`; with
    weights of the entries the sum of the weighted ones, and of the targets' weights."""
    wide = logits_BSV if logits_BSV.dtype == torch.float64 else logits_BSV.float()
    if weights_V is not None:
        weights_V = weights_V.to(wide)
    loss_sum = F.cross_entropy(
        wide.flatten(0, 1), targets_BS.flatten(), weights_V, reduction="sum", ignore_index=IGNORED
    )
    counts_BS = targets_BS != IGNORED
    if weights_V is not None:
        counts_BS = weights_V[targets_BS.clamp(min=0)] * counts_BS
    return loss_sum, counts_BS.sum()


class LabelLoss:
    """`next_token_loss` of the label that follows a text, and how many labels are the likeliest."""

    def __init__(self, class_weights: Sequence[float] | None = None) -> None:
        self._weights_V = None if class_weights is None else torch.tensor(class_weights)

    def __call__(self, logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, ...]:
        right_BS = logits_BSV.argmax(dim=-1) == targets_BS
        num_labels = (targets_BS != IGNORED).sum()
        return *next_token_loss(logits_BSV, targets_BS, self._weights_V), right_BS.sum(), num_labels


def forward_backward(
    model: nn.Module,
    meshes: Meshes,
    micro_batches: Iterable[Batch],
    *,
    precision: Precision,
    loss_of: LossOf = next_token_loss,
    loss_scale: float = 1.0,
    on_phase: Callable[[Phase], None] = lambda phase: None,
    uneven: Uneven | None = None,
    targets_per_sample: float | None = None,
) -> Losses:
    """Add the gradients of one optimizer step to the parameters'; they are sums, already reduced.

    Args:
        model: As `apply` returned it.
        meshes: Where this rank stands.
        micro_batches: This data rank's, `layout.accumulation` of them, on the model's device and
            all of one shape, but for the number of samples where ranks take unequal numbers. Taken
            one at a time, except by a pipeline, which needs all.
        precision: The job's.
        loss_of: The loss of one micro-batch.
        loss_scale: Gradients come out multiplied by it: a loss scaler's, or 1.
        on_phase: Told before each phase of each micro-batch. A pipeline mixes them, and tells of
            one backward.
        uneven: Where micro-batches differ in size or number from the layout's.
        targets_per_sample: Their mean, where not every token of a sample is a target.
    """
    layout, total = meshes.layout, _Total(meshes, uneven, targets_per_sample)
    sizes = layout.micro_batches_of(meshes.place.data)
    num = len(sizes) if uneven is None else uneven.num_micro_batches
    if isinstance(model, pipeline.Pipeline):
        parts = [_own_part(batch, meshes, model) for batch in micro_batches]
        on_phase("backward")
        total.expect(parts[0])
        with _loss_context(model, meshes, loss_of) as own_loss_of:
            seen = pipeline.forward_backward(
                model,
                [(part.inputs_BS, part.targets_BS) for part in parts],
                own_loss_of,
                documents=[part.documents for part in parts],
                loss_scale=loss_scale / total.expected,
                forward_context=partial(autocast, precision, meshes.device_type, layout),
            )
        total.add(*seen)
        return total.losses()
    for index, batch in enumerate(micro_batches):
        set_gradient_sync(model, layout, is_last=index == num - 1)
        part = _own_part(batch, meshes, model)
        total.expect(part)
        on_phase("forward")
        counts_nothing = uneven is None and not sizes[index]
        factor = loss_scale * loss_factor(layout, model) / total.expected
        if counts_nothing:
            factor = 0.0
        with (
            _loss_context(model, meshes, loss_of) as own_loss_of,
            kept_apart(part.documents),
            balanced(model, batch[1], factor),
        ):
            with autocast(precision, meshes.device_type, layout):
                output = model(part.inputs_BS)
                check_asked(part.documents)
                on_phase("loss")
                loss_sum, *counts = own_loss_of(output, part.targets_BS)
            del output
            on_phase("backward")
            (loss_sum * factor).backward()  # type: ignore[no-untyped-call]
        if not counts_nothing:
            total.add(loss_sum, *counts)
        del loss_sum
    finish_gradients(model)
    return total.losses()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    meshes: Meshes,
    micro_batches: Iterable[Batch],
    *,
    precision: Precision,
    loss_of: LossOf = next_token_loss,
) -> Losses:
    """The losses of some micro-batches without gradients. Every rank makes the same number of
    calls, which sharded models and pipelines need; targets that only fill up are `IGNORED`."""
    layout, total = meshes.layout, _Total(meshes)
    context = partial(autocast, precision, meshes.device_type, layout)
    if isinstance(model, pipeline.Pipeline):
        parts = [_own_part(batch, meshes, model) for batch in micro_batches]
        total.expect(parts[0])
        with _loss_context(model, meshes, loss_of) as own_loss_of:
            total.add(
                *pipeline.evaluate(
                    model,
                    [(part.inputs_BS, part.targets_BS) for part in parts],
                    own_loss_of,
                    documents=[part.documents for part in parts],
                    forward_context=context,
                )
            )
        free_gathered(model)
        return total.losses()
    for batch in micro_batches:
        part = _own_part(batch, meshes, model)
        total.expect(part)
        with (
            _loss_context(model, meshes, loss_of) as own_loss_of,
            context(),
            kept_apart(part.documents),
        ):
            output = model(part.inputs_BS)
            check_asked(part.documents)
            total.add(*own_loss_of(output, part.targets_BS))
        free_gathered(model)
    return total.losses()


@contextmanager
def _loss_context(model: nn.Module, meshes: Meshes, loss_of: LossOf) -> Iterator[LossOf]:
    """The loss to use inside, as every tensor rank has it: in chunks, if it is the usual one and
    the model's head was deferred."""
    with loss_context(meshes.layout):
        if loss_of is not next_token_loss:
            yield partial(_local_loss, loss_of)
            return
        with in_chunks(model) as chunked:
            yield chunked or partial(_local_loss, loss_of)


def _local_loss(loss_of: LossOf, output: Tensor, targets_BS: Tensor) -> tuple[Any, ...]:
    """The loss as every tensor rank has it, also of logits that are split over the vocabulary, and
    its counts."""
    loss_sum, *counts = loss_of(output, targets_BS)
    return loss_sum.to_local() if isinstance(loss_sum, DTensor) else loss_sum, *counts


class _Part(NamedTuple):
    """This context rank's part of a micro-batch."""

    inputs_BS: Tensor
    targets_BS: Tensor
    documents: Documents | None


def _own_part(batch: Batch, meshes: Meshes, model: nn.Module) -> _Part:
    """This context rank's tokens, and where the documents are where samples are packed."""
    inputs_BS, targets_BS, *ends = batch
    layout, rank = meshes.layout, meshes.place.context
    documents = None
    if ends:
        keep_apart(model, layout)
        documents = Documents(ends[0], inputs_BS.shape[1], layout, rank)
    own_inputs, own_targets = (local_tokens(each, layout, rank) for each in (inputs_BS, targets_BS))
    return _Part(own_inputs, own_targets, documents)


class _Total:
    """Adds up the losses of the micro-batches."""

    def __init__(
        self, meshes: Meshes, uneven: Uneven | None = None, per_sample: float | None = None
    ) -> None:
        self._layout = meshes.layout
        self._device = torch.device(meshes.device_type)
        self._is_counted = meshes.counts_loss
        self._seen: list[tuple[Tensor | int, ...]] = []
        self.expected = (per_sample or 0.0) * meshes.layout.global_batch
        if uneven is not None:
            self.expected = uneven.num_targets

    def expect(self, part: _Part) -> None:
        """Unless it is known, every micro-batch is expected to have as many as the first."""
        if not self.expected:
            per_sample = part.targets_BS.numel() * self._layout.context / len(part.targets_BS)
            self.expected = per_sample * self._layout.global_batch

    def add(self, loss_sum: Tensor, *counts: Tensor | int) -> None:
        self._seen.append((loss_sum.detach(), *counts))

    def losses(self) -> Losses:
        sums = [torch.zeros((), dtype=torch.float64, device=self._device)] * 4
        for seen in self._seen if self._is_counted else ():
            sums = [total + each for total, each in zip(sums, (*seen, 0, 0), strict=False)]
        loss_sum, num_targets, num_right, num_judged = sums
        return Losses(
            loss_sum=loss_sum,
            num_targets=num_targets,
            num_right=num_right,
            num_judged=num_judged,
            expected_targets=self.expected,
        )
