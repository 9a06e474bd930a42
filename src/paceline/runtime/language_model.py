"""The built-in trainer: a causal language model on bytes of text.

Written against the same `Session` as a training function of your own.

Letters in tensor names: B samples in a micro-batch, S tokens in a sample.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from paceline.record.run import check_same_data
from paceline.runtime import strategy
from paceline.runtime.bigram import bigram_loss
from paceline.runtime.data import TextData, load_text
from paceline.runtime.devices import to_device
from paceline.runtime.loop import Evaluate
from paceline.runtime.models import make_model
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.session import Session
from paceline.spec.corpus import find_corpus


def train(session: Session) -> None:
    """Train the job's model on the job's text."""
    spec = session.job.spec
    text, held_out = session.keep("text", lambda: _load(session))
    model = session.build(make_model(session.job, session.plan.decoder))
    optimizer = make_optimizer(model, spec.train, session.ways)
    evaluate = None if held_out is None else _evaluation(session, model, text, held_out)
    for step in session.steps(
        model, optimizer, evaluate=evaluate, tokens_per_sample=spec.data.seq_len
    ):
        step.train(text.samples, text.num_samples)
        step.apply()


def _load(session: Session) -> tuple[TextData, TextData | None]:
    check_same_data(session.run, find_corpus(session.job))
    return load_text(session.job)


def _evaluation(session: Session, model: nn.Module, text: TextData, held_out: TextData) -> Evaluate:
    """Held-out loss on the same samples every time, spread evenly over the held-out text.

    Every rank makes the same number of forward passes; targets of samples that are there only to
    fill the last ones do not count.
    """
    place, layout = session.place, session.plan.layout
    num_samples = min(session.job.spec.evaluate.samples, held_out.num_samples)
    ids = np.linspace(0, held_out.num_samples - 1, num_samples).round().astype(np.int64)
    rounds = -(-num_samples // (layout.data * layout.micro_batch))
    filled = np.resize(ids, rounds * layout.data * layout.micro_batch)
    counts = np.arange(len(filled)) < num_samples
    mine = slice(session.meshes.place.data, None, layout.data)
    ids_of_rounds = filled[mine].reshape(rounds, layout.micro_batch)
    counts_of_rounds = counts[mine].reshape(rounds, layout.micro_batch)
    if session.is_first and place.generation == 1:
        session.note_baseline("bigram model", bigram_loss(text.text, held_out.text))

    def batches() -> Iterator[strategy.Batch]:
        for ids_B, counts_B in zip(ids_of_rounds, counts_of_rounds, strict=True):
            inputs_BS, targets_BS = held_out.samples(ids_B)
            targets_BS[~torch.from_numpy(counts_B)] = strategy.IGNORED
            yield to_device(inputs_BS, place.device), to_device(targets_BS, place.device)

    def evaluate() -> tuple[Tensor, Tensor]:
        losses = strategy.evaluate(model, session.meshes, batches(), precision=session.precision)
        return losses.loss_sum, losses.num_targets

    return evaluate
