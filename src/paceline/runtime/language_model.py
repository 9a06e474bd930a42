"""The built-in trainer: a causal language model on tokens, of bytes or prepared.

Written against the same `Session` as a training function of your own.

Letters in tensor names: B samples in a micro-batch, S tokens in a sample.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.job import ObjectiveSpec
from paceline.job.data_rules import objective_of
from paceline.parallel.layout import Layout
from paceline.prepare import find_data
from paceline.record.run import check_same_data
from paceline.runtime import strategy
from paceline.runtime.data import PreparedData, Samples, TextData, load_samples
from paceline.runtime.evaluation import Evaluate, Share
from paceline.runtime.models import make_model
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.preference import Pairs, PreferenceLoss, reference_of
from paceline.runtime.sampling import Ids
from paceline.runtime.session import Session


def train(session: Session) -> None:
    """Train the job's model on the job's text."""
    train_on(session, *session.keep("data", lambda: _load(session)))


def train_on(session: Session, data: Samples, held_out: Samples | None) -> None:
    """Train the job's model on some samples, and evaluate it on others."""
    spec = session.job.spec
    model = session.build(make_model(session.job, session.plan.decoder, session.precision))
    optimizer = make_optimizer(model, spec.train, session.ways)
    loss_of: strategy.LossOf = strategy.next_token_loss
    asked = spec.train.objective or ObjectiveSpec()
    if objective_of(spec) == "dpo":
        data, held_out, loss_of = _preference(session, model, data, held_out)
    elif objective_of(spec) == "classification":
        loss_of = strategy.LabelLoss(asked.class_weights)
    evaluate = None if held_out is None else _evaluation(session, model, held_out, loss_of)
    if isinstance(data, TextData) and isinstance(held_out, TextData):
        _note_bigram(session, data, held_out)
    for step in session.steps(
        model,
        optimizer,
        evaluate=evaluate,
        source_weights=None if held_out is None else _source_weights(held_out),
        tokens_per_sample=spec.data.seq_len,
    ):
        step.train(
            data.samples,
            data.order,
            loss_of=loss_of,
            targets_per_sample=data.targets_per_sample,
            ahead=True,
        )
        step.apply()


def _load(session: Session) -> tuple[Samples, Samples | None]:
    data = find_data(session.job)
    assert data is not None, "the built-in trainer has data"
    check_same_data(session.run, data)
    return load_samples(data, session.job.spec.data.seq_len)


def _note_bigram(session: Session, text: TextData, held_out: TextData) -> None:
    if session.is_first and session.place.generation == 1:
        session.note_baseline("bigram model", bigram_loss(text.text, held_out.text))


def _preference(
    session: Session, model: nn.Module, data: Samples, held_out: Samples | None
) -> tuple[Samples, Samples | None, strategy.LossOf]:
    """Pairs to train on and to evaluate, and their loss. Collective."""
    assert isinstance(data, PreparedData)
    assert held_out is None or isinstance(held_out, PreparedData)
    train = Pairs(data, first=0)
    evaluated = None if held_out is None else Pairs(held_out, first=data.num_samples)
    ids = {} if evaluated is None else _evaluated_ids(session, evaluated)
    batches = partial(_micro_batches, session)
    reference_N2 = reference_of(session, model, batches, train, ids, evaluated)
    asked = session.job.spec.train.objective or ObjectiveSpec()
    return train, evaluated, PreferenceLoss(asked.beta, reference_N2)


def _evaluation(
    session: Session, model: nn.Module, held_out: Samples, loss_of: strategy.LossOf
) -> Evaluate:
    """Evaluation loss by source on the same samples every time, spread evenly over each source."""
    asked = _evaluated_ids(session, held_out)

    def evaluate() -> dict[str, Share]:
        found: dict[str, Share] = {}
        for name, ids in asked.items():
            losses = strategy.evaluate(
                model,
                session.meshes,
                _micro_batches(session, held_out, ids),
                precision=session.precision,
                loss_of=loss_of,
            )
            found[name] = losses.sums
        return found

    return evaluate


def _source_weights(held_out: Samples) -> dict[str, float]:
    """Weight of each source; empty where they have none."""
    order = held_out.order
    return {} if isinstance(order, int) else dict(zip(held_out.sources, order.weights, strict=True))


def _evaluated_ids(session: Session, held_out: Samples) -> dict[str, Ids]:
    wanted = session.job.spec.evaluate.samples
    return {
        name: _spread(ids, wanted * len(ids) / held_out.num_samples)
        for name, ids in held_out.sources.items()
    }


def _micro_batches(session: Session, samples: Samples, ids: Ids) -> Iterator[strategy.Batch]:
    """This rank's micro-batches of some samples, on its device; those that only fill up the last
    ones have no target."""
    for ids_B, counts_B in _rounds(ids, session.plan.layout, session.meshes.place.data):
        inputs_BS, targets_BS, *ends = samples.samples(ids_B)
        targets_BS[~torch.from_numpy(counts_B)] = strategy.IGNORED
        batch: strategy.Batch = (inputs_BS, targets_BS, *ends)  # type: ignore[assignment]
        yield strategy.on_device(batch, session.place.device)


def _spread(ids: range, wanted: float) -> Ids:
    num_samples = min(max(1, round(wanted)), len(ids))
    return np.linspace(ids.start, ids.stop - 1, num_samples).round().astype(np.int64)


def _rounds(ids: Ids, layout: Layout, data_rank: int) -> Iterator[tuple[Ids, NDArray[np.bool_]]]:
    """This rank's ids of each micro-batch, and which of them count.

    Every rank makes the same number of forward passes; targets of samples that are there only to
    fill the last ones do not count.
    """
    rounds = -(-len(ids) // (layout.data * layout.micro_batch))
    filled = np.resize(ids, rounds * layout.data * layout.micro_batch)
    counts = np.arange(len(filled)) < len(ids)
    mine = slice(data_rank, None, layout.data)
    shape = rounds, layout.micro_batch
    yield from zip(filled[mine].reshape(shape), counts[mine].reshape(shape), strict=True)


SMOOTHING = 0.1
"""Added to the count of every pair of bytes, so that an unseen pair has a finite loss. A guess:
at 30 MB of text the loss hardly depends on it."""

_CHUNK = 1 << 20


def bigram_loss(train_bytes: NDArray[np.uint8], held_out_bytes: NDArray[np.uint8]) -> float:
    """Nats per byte, on held-out bytes, of the bigram model counted on the training bytes.

    Args:
        held_out_bytes: At least two bytes; the first is only context.

    >>> text = np.frombuffer(b"abababababababab", dtype=np.uint8)
    >>> round(bigram_loss(text, text), 2)
    1.47
    """
    counts = _pair_counts(train_bytes) + SMOOTHING
    log_probability = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    seen = _pair_counts(held_out_bytes)
    return float(-(seen * log_probability).sum() / seen.sum())


def _pair_counts(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How often each byte follows each other: `counts[first, second]`, in 8 MiB of memory."""
    counts = np.zeros(256 * 256, dtype=np.int64)
    for start in range(0, len(text) - 1, _CHUNK):
        first = text[start : min(start + _CHUNK, len(text) - 1)].astype(np.uint16)
        second = text[start + 1 : start + 1 + len(first)]
        counts += np.bincount(first * 256 + second, minlength=256 * 256)
    return counts.reshape(256, 256)
