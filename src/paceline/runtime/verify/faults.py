"""Where a test may step in and break something, to see that it is found.

Nothing here can be reached from a job, an option or the environment: `verify` itself always runs
with `Faults()`, which does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.record.verification import Run
from paceline.runtime.sampling import Ids
from paceline.runtime.strategy import Meshes


class Faults:
    """Nothing is broken."""

    def built(
        self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, meshes: Meshes
    ) -> None:
        """The model is split and loaded, and no step is done."""

    def ids(self, run: Run, step: int, ids: Ids, meshes: Meshes) -> Ids:
        """The samples that a rank is about to read."""
        return ids

    def seed(self, run: Run, step: int, seed: int, meshes: Meshes) -> int:
        """The seed of the step's random numbers."""
        return seed

    @contextmanager
    def around_backward(
        self, run: Run, step: int, model: nn.Module, meshes: Meshes
    ) -> Iterator[None]:
        """All micro-batches of a step, forward and backward."""
        yield

    def before_update(self, run: Run, step: int, model: nn.Module, meshes: Meshes) -> None:
        """Gradients are final."""

    def after_update(
        self,
        run: Run,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        meshes: Meshes,
    ) -> None:
        """Parameters are updated."""
