"""What every step of a rank is made with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel.layout import Layout
from paceline.parallel.rank_map import rank_of
from paceline.runtime import strategy
from paceline.runtime.batches import Batches
from paceline.runtime.feed import Feed
from paceline.runtime.optimizer.adamw_8bit import AdamW8bit
from paceline.runtime.phase_clock import PhaseClock, make_clock
from paceline.runtime.sampling import DataRank, Ids, Mixture
from paceline.runtime.step_hooks import NO_HOOKS, Hooks

_ELEMENT_WISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    AdamW8bit,
)
"""Optimizers that update a shard from that shard alone. Adafactor sums over rows and columns, and
Muon over whole matrices: their update communicates."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """What every step of a rank is made with: model, optimizer and layout, and what surrounds it.

    One driver for whoever trains. A run gives it hooks; without them a step only trains.
    """

    model: nn.Module
    """As `strategy.apply` returned it."""

    optimizer: torch.optim.Optimizer
    """Its groups keep the ratio of their learning rates to the first group's."""

    layout: Layout
    meshes: strategy.Meshes
    device: torch.device
    precision: strategy.Precision
    seed: int
    """Seed of the samples' order, and of the random numbers inside a step."""

    clip_norm: float | None
    scaler: strategy.LossScaler | None = None
    hooks: Hooks = NO_HOOKS
    where: str = "the program"
    """What an error about the training function points at."""

    batches: Batches | None = None
    """Sizes of the run's batches; None where they are all the layout's."""

    buffers: strategy.SavedBuffers = field(init=False)
    clock: PhaseClock = field(init=False)
    data_rank: DataRank = field(init=False)
    shares: list[float] = field(init=False)
    """Learning rate of each group, as a multiple of the first group's."""

    _feed: Feed | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.buffers = strategy.SavedBuffers(self.model)
        self.clock = make_clock(self.device)
        place = self.meshes.place
        self.data_rank = DataRank(
            seed=self.seed,
            layout=self.layout,
            rank=place.data,
            batches=self.batches or Batches(self.layout.global_batch),
        )
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.shares = [rate / (rates[0] or 1.0) for rate in rates]

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many ranks vote."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward pass: 1 but in fp16."""
        return 1.0 if self.scaler is None else self.scaler.factor

    @property
    def is_element_wise(self) -> bool:
        """Whether the optimizer updates each number by itself, without other ranks."""
        return type(self.optimizer) in _ELEMENT_WISE

    def feed(
        self, samples: Callable[[Ids], Any], num_samples: int | Mixture, *, ahead: bool = False
    ) -> Feed:
        """What gives steps these samples; the one of the step before where it reads the same."""
        if self._feed is None or self._feed.reads != (samples, num_samples):
            rank, device = self.data_rank, self.device
            self._feed = Feed(samples, num_samples, rank=rank, device=device, ahead=ahead)
        return self._feed

    def prepare(self, number: int, learning_rate: float) -> None:
        """Set the random numbers and the learning rate of the step of this number, from 1."""
        # Dropout and the like: the same on a resumed run, different in every step and on all ranks
        # but those of a tensor group, whose masks `strategy` tells apart where they must differ.
        place = self.meshes.place
        tensor_group = rank_of(
            self.layout, context=place.context, data=place.data, pipeline=place.pipeline
        )
        drawn = np.random.SeedSequence([self.seed, number, tensor_group])
        seeds = [int(seed) for seed in drawn.generate_state(3, np.uint32)]
        torch.manual_seed(seeds[0])
        np.random.seed(seeds[1])
        random.seed(seeds[2])
        for group, share in zip(self.optimizer.param_groups, self.shares, strict=True):
            group["lr"] = learning_rate * share
