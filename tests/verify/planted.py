"""Faults for the tests to find: one class each. Every one strikes in one step and place.

They break the training of `paceline.runtime.verify.steps` from outside: nothing there knows them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from paceline.runtime.sampling import Ids, rank_slots, sample_ids
from paceline.runtime.state import named_parameters
from paceline.runtime.step import Step
from paceline.runtime.strategy.tensor.randomness import SplitRandom
from paceline.runtime.trainer import Trainer
from paceline.runtime.verify import steps
from paceline.runtime.verify.steps import Noting, Training

STEP = 2
VICTIM = "blocks.1.ffn.up.weight"


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def victim_of(of: Training) -> torch.Tensor:
    return named_parameters(of.model)[VICTIM]


class Faults:
    """Where a fault may step in; here nothing is broken."""

    def built(self, of: Training) -> None:
        """The model is split and loaded, and no step is done."""

    def ids(self, of: Training, step: int, ids: Ids) -> Ids:
        """The samples that a rank is about to read."""
        return ids

    def around_step(self, of: Training, step: int) -> Any:
        """All of a step: what is patched inside."""
        return nullcontext()

    def before_update(self, of: Training, step: int) -> None:
        """Gradients are final, and nothing was concluded from them."""

    def after_update(self, of: Training, step: int) -> None:
        """Parameters are updated."""


@contextmanager
def planting(name: str | None) -> Iterator[None]:
    """While it lasts, every training has the fault of that class; None is none."""
    if name is None:
        yield
        return
    faults: Faults = globals()[name]()

    class Broken(Training):
        def step(self, number: int) -> Any:
            if not hasattr(self, "is_begun"):
                self.is_begun = True
                faults.built(self)
            return super().step(number)

        def ids(self, number: int) -> Ids:
            return faults.ids(self, number, super().ids(number))

        def try_step(self, number: int, ids: Ids) -> Step:
            with faults.around_step(self, number):
                step = super().try_step(number, ids)
            faults.after_update(self, number)
            return step

    class BreaksGradients(Noting):
        def pass_by(self, point: str, step: int) -> set[str]:
            if point == "vote":
                faults.before_update(self.training, step)
            return set()

    with (
        mock.patch.object(steps, "Training", Broken),
        mock.patch.object(steps, "Noting", BreaksGradients),
    ):
        yield


class EveryGradientDoubled(Faults):
    """The loss is not divided by the number of data ranks."""

    def before_update(self, of: Training, step: int) -> None:
        if step == STEP:
            for parameter in of.model.parameters():
                local(parameter.grad).mul_(2)


class OneGradientHalved(Faults):
    def before_update(self, of: Training, step: int) -> None:
        if step == STEP:
            local(victim_of(of).grad).mul_(0.5)


class NoAllReduce(Faults):
    """Every micro-batch of the step is said not to be the last, so that nothing is reduced."""

    def around_step(self, of: Training, step: int) -> Any:
        from paceline.runtime.strategy import train

        reduce = train.set_gradient_sync

        def never(model: Any, layout: Any, *, is_last: bool) -> None:
            reduce(model, layout, is_last=False)

        return mock.patch.object(train, "set_gradient_sync", never if step == STEP else reduce)


class SameSamples(Faults):
    """Data rank 1 reads what data rank 0 does."""

    def ids(self, of: Training, step: int, ids: Ids) -> Ids:
        if step != STEP or of.meshes.place.data != 1:
            return ids
        layout = of.run.layout
        slots = rank_slots(layout, 0)
        whole = range(slots[0].start, slots[-1].stop)
        batch = layout.global_batch
        return sample_ids(step - 1, whole, seed=3, global_batch=batch, num_samples=37)


class SkippedSampler(Faults):
    """In the second step, rank 0 reads the first step's samples again."""

    def ids(self, of: Training, step: int, ids: Ids) -> Ids:
        if step == 1:
            self.before = ids
        return self.before if step == STEP and of.meshes.place.data == 0 else ids


class StaleCopy(Faults):
    """One rank's part of a parameter is left as it was before the update."""

    def before_update(self, of: Training, step: int) -> None:
        self.before = local(victim_of(of).detach()).clone()

    @torch.no_grad()
    def after_update(self, of: Training, step: int) -> None:
        if step == STEP and of.meshes.place.rank == 1:
            local(victim_of(of)).copy_(self.before)


class ForwardLeavesOutRank1(Faults):
    """The output of a feed-forward on rank 1 is a hundredth too large."""

    step = 0

    def around_step(self, of: Training, step: int) -> Any:
        self.step = step
        return nullcontext()

    def built(self, of: Training) -> None:
        def enlarge(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
            return output * 1.01 if self.step == STEP and of.meshes.place.rank == 1 else None

        named = dict(of.model.named_modules())
        name = next(name for name in named if name.endswith("blocks.1.ffn.down"))
        named[name].register_forward_hook(enlarge)


class NarrowGradients(Faults):
    """In the job's precision, gradients are rounded to bfloat16."""

    def before_update(self, of: Training, step: int) -> None:
        if of.run.precision != "fp64":
            for parameter in of.model.parameters():
                local(parameter.grad).copy_(local(parameter.grad).bfloat16())


class NotANumber(Faults):
    def before_update(self, of: Training, step: int) -> None:
        if step == STEP and of.run.precision != "fp64":
            local(victim_of(of).grad).fill_(float("nan"))


class ForgottenMoment(Faults):
    """A resumed run begins with one moment at zero."""

    def built(self, of: Training) -> None:
        if of.run.load is not None and of.run.steps > 2:
            local(of.optimizer.state[victim_of(of)]["exp_avg"]).zero_()


class OneDropoutSeed(Faults):
    """Tensor ranks draw the same numbers for different activations."""

    def around_step(self, of: Training, step: int) -> Any:
        return mock.patch.object(SplitRandom, "_seed_from", lambda self, seed: seed % 2**63)


class OneSeedForAll(Faults):
    """Data ranks draw the same numbers for different samples."""

    def around_step(self, of: Training, step: int) -> Any:
        prepare = Trainer.prepare

        def seeded(trainer: Trainer, number: int, learning_rate: float) -> None:
            prepare(trainer, number, learning_rate)
            torch.manual_seed(7)

        return mock.patch.object(Trainer, "prepare", seeded)
