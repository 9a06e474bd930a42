"""The built-in trainer: a decoder-only language model on bytes of text.

Written against the same `Session` as a training function of your own.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.record.run import check_same_data
from paceline.runtime.bigram import bigram_loss
from paceline.runtime.data import TextData, load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.loop import Evaluate
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.session import Session
from paceline.spec.corpus import find_corpus


def train(session: Session) -> None:
    """Train the plan's decoder on the job's text."""
    spec, shape = session.job.spec, session.plan.decoder
    assert shape is not None, "the built-in trainer is for models with a decoder shape"
    check_same_data(session.run, find_corpus(session.job))
    text, held_out = load_text(session.job)
    model = session.build(lambda: Decoder(shape, spec.data.seq_len))
    optimizer = make_optimizer(model, spec.train)
    evaluate = None if held_out is None else _evaluation(session, model, text, held_out)
    for step in session.steps(
        model, optimizer, evaluate=evaluate, tokens_per_sample=spec.data.seq_len
    ):
        for ids in step.micro_batches(text.num_samples):
            inputs_BS, targets_BS = text.samples(ids)
            with session.autocast():
                loss = _loss_per_token(model, inputs_BS, targets_BS).mean()
            step.backward(loss)
        step.apply()


def _evaluation(session: Session, model: nn.Module, text: TextData, held_out: TextData) -> Evaluate:
    """Held-out loss on the same samples every time, spread evenly over the held-out text.

    Every rank makes the same number of forward passes, which FSDP2 needs; samples that are there
    only to fill the last one have no weight.
    """
    place, micro_batch = session.place, session.plan.layout.micro_batch
    num_samples = min(session.job.spec.evaluate.samples, held_out.num_samples)
    ids = np.linspace(0, held_out.num_samples - 1, num_samples).round().astype(np.int64)
    rounds = -(-num_samples // (place.world_size * micro_batch))
    filled = np.resize(ids, rounds * place.world_size * micro_batch)
    weights = np.arange(len(filled)) < num_samples
    mine = slice(place.rank, None, place.world_size)
    ids_of_rounds = filled[mine].reshape(rounds, micro_batch)
    weights_of_rounds = weights[mine].reshape(rounds, micro_batch)
    if session.is_first and place.generation == 1:
        session.note_baseline("bigram model", bigram_loss(text.text, held_out.text))

    def evaluate() -> tuple[Tensor, int]:
        total = torch.zeros((), dtype=torch.float64)
        for ids_B, weights_B in zip(ids_of_rounds, weights_of_rounds, strict=True):
            inputs_BS, targets_BS = held_out.samples(ids_B)
            losses_BS = _loss_per_token(model, inputs_BS, targets_BS)
            means_B = losses_BS.double().mean(dim=1).cpu()
            total += (means_B * torch.from_numpy(weights_B)).sum()
        return total, int(weights_of_rounds.sum())

    return evaluate


def _loss_per_token(model: nn.Module, inputs_BS: Tensor, targets_BS: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits_BSV = model(inputs_BS.to(device))
    losses = F.cross_entropy(
        logits_BSV.flatten(0, 1).float(), targets_BS.to(device).flatten(), reduction="none"
    )
    return losses.view_as(targets_BS)
