"""Faults for the tests to find: one class each. Every one strikes in one step and place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.record.verification import Run
from paceline.runtime.sampling import Ids, rank_slots, sample_ids
from paceline.runtime.state import named_parameters
from paceline.runtime.strategy import Meshes
from paceline.runtime.strategy.tensor.randomness import SplitRandom
from paceline.runtime.verify.faults import Faults

STEP = 2
VICTIM = "blocks.1.ffn.up.weight"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class EveryGradientDoubled(Faults):
    """The loss is not divided by the number of data ranks."""

    def before_update(self, run: Run, step: int, model: nn.Module, meshes: Meshes) -> None:
        if step == STEP:
            for parameter in model.parameters():
                local(parameter.grad).mul_(2)


class OneGradientHalved(Faults):
    def before_update(self, run: Run, step: int, model: nn.Module, meshes: Meshes) -> None:
        if step == STEP:
            local(named_parameters(model)[VICTIM].grad).mul_(0.5)


class NoAllReduce(Faults):
    """Every micro-batch of the step is said not to be the last, so that nothing is reduced."""

    @contextmanager
    def around_backward(
        self, run: Run, step: int, model: nn.Module, meshes: Meshes
    ) -> Iterator[None]:
        from paceline.runtime.strategy import train

        reduce = train.set_gradient_sync

        def never(model: nn.Module, layout: Any, *, is_last: bool) -> None:
            reduce(model, layout, is_last=False)

        with mock.patch.object(train, "set_gradient_sync", never if step == STEP else reduce):
            yield


class SameSamples(Faults):
    """Data rank 1 reads what data rank 0 does."""

    def ids(self, run: Run, step: int, ids: Ids, meshes: Meshes) -> Ids:
        if step != STEP or meshes.place.data != 1:
            return ids
        layout = run.layout
        slots = rank_slots(layout, 0)
        whole = range(slots[0].start, slots[-1].stop)
        batch = layout.global_batch
        return sample_ids(step - 1, whole, seed=3, global_batch=batch, num_samples=37)


class SkippedSampler(Faults):
    """In the second step, rank 0 reads the first step's samples again."""

    def ids(self, run: Run, step: int, ids: Ids, meshes: Meshes) -> Ids:
        if step == 1:
            self.before = ids
        return self.before if step == STEP and meshes.place.data == 0 else ids


class StaleCopy(Faults):
    """One rank's part of a parameter is left as it was before the update."""

    @contextmanager
    def around_backward(
        self, run: Run, step: int, model: nn.Module, meshes: Meshes
    ) -> Iterator[None]:
        yield
        self.before = local(named_parameters(model)[VICTIM].detach()).clone()

    @torch.no_grad()
    def after_update(
        self,
        run: Run,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        meshes: Meshes,
    ) -> None:
        if step == STEP and meshes.place.rank == 1:
            local(named_parameters(model)[VICTIM]).copy_(self.before)


class ForwardLeavesOutRank1(Faults):
    """The output of a feed-forward on rank 1 is a hundredth too large."""

    step = 0

    @contextmanager
    def around_backward(
        self, run: Run, step: int, model: nn.Module, meshes: Meshes
    ) -> Iterator[None]:
        self.step = step
        yield

    def built(
        self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, meshes: Meshes
    ) -> None:
        def enlarge(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            return output * 1.01 if self.step == STEP and meshes.place.rank == 1 else None

        named = dict(model.named_modules())
        name = next(name for name in named if name.endswith("blocks.1.ffn.down"))
        named[name].register_forward_hook(enlarge)


class NarrowGradients(Faults):
    """In the job's precision, gradients are rounded to bfloat16."""

    def before_update(self, run: Run, step: int, model: nn.Module, meshes: Meshes) -> None:
        if run.precision != "fp64":
            for parameter in model.parameters():
                local(parameter.grad).copy_(local(parameter.grad).bfloat16())


class NotANumber(Faults):
    def before_update(self, run: Run, step: int, model: nn.Module, meshes: Meshes) -> None:
        if step == STEP and run.precision != "fp64":
            local(named_parameters(model)[VICTIM].grad).fill_(float("nan"))


class ForgottenMoment(Faults):
    """A resumed run begins with one moment at zero."""

    def built(
        self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, meshes: Meshes
    ) -> None:
        if run.load is not None and run.steps > 2:
            state = optimizer.state[named_parameters(model)[VICTIM]]
            local(state["exp_avg"]).zero_()


class OneDropoutSeed(Faults):
    """Tensor ranks draw the same numbers for different activations."""

    @contextmanager
    def around_backward(
        self, run: Run, step: int, model: nn.Module, meshes: Meshes
    ) -> Iterator[None]:
        with mock.patch.object(SplitRandom, "_seed_from", lambda self, seed: seed % 2**63):
            yield


class OneSeedForAll(Faults):
    """Data ranks draw the same numbers for different samples."""

    def seed(self, run: Run, step: int, seed: int, meshes: Meshes) -> int:
        return 7
