"""A tiny decoder and a plain training loop, for the tests that run it in different layouts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.job import TrainSpec
from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.sampling import rank_slots

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


@contextmanager
def fake_rank(layout: Layout, rank: int) -> Iterator[None]:
    """One rank of a world whose other ranks are pretended: no processes, nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=layout.num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(
    layout: Layout, *, precision: str = "fp32", optimizer: str = "adamw", seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The tiny decoder in a layout, and its optimizer."""
    torch.manual_seed(seed)
    meshes = strategy.make_meshes(layout, "cpu")
    model = strategy.apply(Decoder(SHAPE, SEQ_LEN), layout, meshes, precision=precision)
    train = TrainSpec(global_batch=GLOBAL_BATCH, steps=100, learning_rate=3e-3, optimizer=optimizer)
    return model, make_optimizer(model, train)


@cache
def _meshes(layout: Layout, world: object) -> strategy.Meshes:
    """A layout's meshes, once in a world of ranks: its groups take longer to make than a step."""
    return strategy.make_meshes(layout, "cpu")


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
    meshes = _meshes(layout, dist.group.WORLD)
    losses, norms = [], []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SHAPE.vocab, (GLOBAL_BATCH, SEQ_LEN + 1), generator=generator)
        batches = [
            (tokens[part.start : part.stop, :-1], tokens[part.start : part.stop, 1:])
            for part in rank_slots(layout, meshes.place.data)
        ]
        seen = strategy.forward_backward(model, meshes, batches, precision=precision)
        norms.append(float(strategy.gradient_norm(model, meshes)))
        strategy.scale_gradients(model, strategy.clip_factor(norms[-1], clip_norm))
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack([seen.loss_sum, seen.num_targets])
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
    return losses, norms
