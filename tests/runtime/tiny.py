"""A tiny decoder and a plain training loop, for the tests that run it in different layouts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.sampling import rank_slots
from paceline.spec import TrainSpec

SHAPE = DecoderShape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=64,
    tied_embeddings=True,
)
SEQ_LEN = 16
GLOBAL_BATCH = 8

OnGradients = Callable[[nn.Module], Any]


def layout_of(world: int, sharding: str, accumulation: int = 1, *, every: bool = False) -> Layout:
    """Eight samples a step, however they are spread."""
    return Layout(
        data=world,
        sharding=sharding,
        micro_batch=GLOBAL_BATCH // world // accumulation,
        accumulation=accumulation,
        reduce_every_micro_batch=every,
    )


def build(
    layout: Layout, *, precision: str = "fp32", optimizer: str = "adamw", seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny decoder in a layout, and its optimizer."""
    torch.manual_seed(seed)
    mesh = strategy.make_mesh(layout, "cpu")
    model = strategy.apply(Decoder(SHAPE, SEQ_LEN), layout, mesh, precision=precision)
    train = TrainSpec(global_batch=GLOBAL_BATCH, steps=100, learning_rate=3e-3, optimizer=optimizer)
    return model, make_optimizer(model, train)


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    rank: int,
    steps: range,
    *,
    precision: str = "fp32",
    clip_norm: float = 0.5,
) -> tuple[list[float], list[float]]:
    """Losses over the global batch and gradient norms of some steps, numbered from 0."""
    losses, norms = [], []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SHAPE.vocab, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
        slots = rank_slots(rank, layout.data, GLOBAL_BATCH, layout.micro_batch)
        total = torch.zeros(())
        for index, part in enumerate(slots):
            batch = tokens[part.start : part.stop]
            strategy.set_gradient_sync(model, layout, is_last=index == len(slots) - 1)
            with strategy.autocast(precision, "cpu", layout):
                logits = model(batch[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / len(slots)).backward()
            total += loss.detach() / len(slots)
        norms.append(float(strategy.clip_gradients(model, clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / layout.data)
    return losses, norms
