"""The built-in trainer: a decoder-only language model on bytes of text."""

import torch
import torch.nn.functional as F

from paceline.runtime.data import load_text
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.session import Session


def train(session: Session) -> None:
    """Train the plan's decoder on the job's text."""
    spec, shape = session.job.spec, session.plan.decoder
    assert shape is not None, "the built-in trainer runs for models with a decoder shape only"
    text, held_out = load_text(session.job)
    model = session.build(lambda: Decoder(shape, spec.data.seq_len))
    optimizer = make_optimizer(model, spec.train)

    def evaluate() -> tuple[torch.Tensor, int]:
        total, count = torch.zeros(()), 0
        return total, count

    for step in session.steps(
        model, optimizer, evaluate=evaluate, tokens_per_sample=spec.data.seq_len
    ):
        for ids in step.micro_batches(text.num_samples):
            inputs, targets = text.samples(ids)
            with session.autocast():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            step.backward(loss)
        step.apply()
