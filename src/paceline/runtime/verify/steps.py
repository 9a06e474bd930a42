"""One run of a case on this rank: a few steps in a layout, with everything that is judged noted."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import PlanError
from paceline.job import CheckpointSpec, TrainSpec
from paceline.job.train_rules import learning_rate_at
from paceline.record.verification import Bytes, Case, Deviation, Run, RunFacts, StepFacts
from paceline.runtime import strategy
from paceline.runtime.checkpoint import Checkpointer, load
from paceline.runtime.devices import capability_of
from paceline.runtime.digest import state_digest
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.sampling import Ids, rank_slots, sample_ids
from paceline.runtime.state import named_parameters
from paceline.runtime.step import Step
from paceline.runtime.step_hooks import NoHooks
from paceline.runtime.strategy import Meshes, make_meshes
from paceline.runtime.strategy.data.hooks import Compression
from paceline.runtime.trainer import Trainer
from paceline.runtime.verify.compare import (
    deviation,
    digests_of,
    held_bytes,
    pieces_of,
)
from paceline.runtime.verify.masks import Masks
from paceline.runtime.verify.model import build_model, job_of, micro_batches, train_spec
from paceline.runtime.verify.reductions import watch_reductions
from paceline.runtime.verify.watch import Watch
from paceline.runtime.vote import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every run of a case has in common."""

    case: Case
    device: torch.device
    truth: Mapping[str, Tensor]
    folder: Path
    meshes: dict[strategy.Meshes | object, Meshes]
    """By layout: process groups are made once."""

    scales: dict[str, dict[str, float]] = field(default_factory=dict)
    """Run -> its loss scaler's state when its checkpoint was written; only in fp16."""


def train(run: Run, bench: Bench) -> RunFacts:
    """Build the model in the run's layout, train it, and say what was seen. Collective.

    Raises:
        PlanError: The case's own layout is not possible; that of a run beside it is only noted.
    """
    try:
        return Training(run, bench).facts()
    except PlanError as refused:  # the same on every rank: what a layout cannot do is arithmetic
        if run.layout == bench.case.layout and run.compression == "none":
            raise
        return RunFacts(name=run.name, refused="; ".join(each.what for each in refused.problems))


class Noting(NoHooks):
    """What is noted inside a step."""

    def __init__(self, training: "Training") -> None:
        self.training = training

    def decided(self, outcome: Outcome) -> None:
        self.training.note_gradients(outcome.step)


class Training:
    """The state of one run."""

    def __init__(self, run: Run, bench: Bench) -> None:
        self.run, self.case, self.bench = run, bench.case, bench
        self.start = time.perf_counter()
        if run.layout not in bench.meshes:
            bench.meshes[run.layout] = make_meshes(run.layout, bench.device.type)
        self.meshes = bench.meshes[run.layout]
        self.is_wide = run.precision == "fp64"
        self.precision: strategy.Precision = "fp32" if self.is_wide else run.precision  # type: ignore[assignment]
        self.train = train_spec(self.case)
        self.seed = job_of(self.case).spec.train.seed
        _set_up(self.precision, run, bench.device)
        model = build_model(self.case, is_wide=self.is_wide, dropout=run.dropout)
        ways = strategy.ways_of(model)
        self.model = strategy.apply(
            model.to(bench.device),
            run.layout,
            self.meshes,
            precision=self.precision,
            ways=ways,
            options=_options(run, self.case, self.train),
        )
        self.optimizer = make_optimizer(self.model, self.train, ways)
        self.trainer = Trainer(
            model=self.model,
            optimizer=self.optimizer,
            layout=run.layout,
            meshes=self.meshes,
            device=bench.device,
            precision=self.precision,
            seed=self.seed,
            clip_norm=self.train.clip_norm,
            scaler=strategy.LossScaler() if self.precision == "fp16" else None,
            hooks=Noting(self),
        )
        self.watch, self.masks = Watch(), Masks()
        self.gradients: dict[str, Deviation] = {}
        self.missing: tuple[str, ...] = ()
        self.held: Bytes | None = None
        self.optimizer.register_step_post_hook(self._hold)  # gradients are still there

    def facts(self) -> RunFacts:
        """Every step, and what is left at the end."""
        run, first = self.run, 1
        loaded: str | None = None
        saved: str | None = None
        checkpoints = Checkpointer(self.bench.folder / run.name, CheckpointSpec())
        if run.load is not None:
            path = next(iter(sorted((self.bench.folder / run.load).glob("step-*"))))
            load(path, self.model, self.optimizer)
            first = int(path.name.removeprefix("step-")) + 1
            loaded = state_digest(self.model, self.optimizer)
            if (scaler := self.trainer.scaler) is not None:
                scaler.load_state_dict(self.bench.scales[run.load])
        steps = []
        reductions = None
        # PowerSGD sends whole gradients in its first steps.
        is_compressed = run.compression != "none"
        watched = run.steps if is_compressed else first + 1
        for number in range(first, run.steps + 1):
            is_watched = number == watched and (is_compressed or run.name == "job")
            with watch_reductions(is_watched) as seen:
                facts = self.step(number)
            steps.append(facts)
            if is_watched:
                reductions = seen.facts()
            if run.save_after == number:
                checkpoints.save(number, self.model, self.optimizer, layout=run.layout.name)
                saved = state_digest(self.model, self.optimizer)
                if (scaler := self.trainer.scaler) is not None:
                    self.bench.scales[run.name] = scaler.state_dict()
        return RunFacts(
            name=run.name,
            steps=tuple(steps),
            pieces=pieces_of(self.model),
            held=self.held,
            loaded=loaded,
            saved=saved,
            ended=state_digest(self.model, self.optimizer),
            reductions=reductions or (),
            seconds=time.perf_counter() - self.start,
        )

    def step(self, number: int) -> StepFacts:
        """One optimizer step, by the driver that trains in a run."""
        ids = self.ids(number)
        step, num_overflows = self.try_step(number, ids), 0
        while step.overflowed:
            # A refused step changes nothing: the next one has the same parameters, lower scaled.
            num_overflows += 1
            step = self.try_step(number, ids)
        return StepFacts(
            step=number,
            loss_sum=float(step.loss_sum),
            num_targets=int(step.num_targets),
            grad_norm=step.grad_norm,
            ids=tuple(ids.tolist()),
            modules=self.watch.modules,
            inputs=self.watch.inputs,
            gradients=self.gradients,
            missing=self.missing,
            parameters=self._parameters(number),
            digests=digests_of(self.model),
            masks=self.masks.digests,
            mask_counts=self.masks.counts,
            loss_scale=self.trainer.loss_scale,
            num_overflows=num_overflows,
        )

    def try_step(self, number: int, ids: Ids) -> Step:
        """Compute and apply a step of these samples, which an overflow refuses."""
        step = Step(number, self.trainer, learning_rate_at(number, self.train))
        self.watch.clear()
        self.masks.clear()
        batches = micro_batches(self.case, ids, self.meshes, self.bench.device)
        with ExitStack() as stack:
            if self.run.watched:
                stack.enter_context(self.watch.over(self.model))
            if self.run.dropout:
                stack.enter_context(self.masks.over(self.model))
            step.train(lambda _: next(batches), self.case.num_samples)
        step.apply()
        return step

    def _hold(self, *_: object) -> None:
        self.held = held_bytes(self.model, self.optimizer)

    def note_gradients(self, number: int) -> None:
        """How far the gradients are from a single device's, before they are clipped."""
        if self.run.watched or self.run.compared:
            self.gradients, self.missing = self._gradients(number)

    def ids(self, number: int) -> Ids:
        """The samples of this rank in a step."""
        layout = self.run.layout
        slots = rank_slots(layout, self.meshes.place.data)
        whole = range(slots[0].start, slots[-1].stop)
        return sample_ids(
            number - 1,
            whole,
            seed=self.seed,
            global_batch=layout.global_batch,
            num_samples=self.case.num_samples,
        )

    def _gradients(self, number: int) -> tuple[dict[str, Deviation], tuple[str, ...]]:
        found: dict[str, Deviation] = {}
        scale = self.trainer.loss_scale
        missing = []
        for name, parameter in named_parameters(self.model).items():
            truth = self.bench.truth.get(f"gradient/{number}/{name}")
            if truth is None:
                continue
            if parameter.grad is None:
                missing.append(name)
                continue
            shares = {
                rank: share
                for rank in range(self.case.layout.data)
                if (share := self.bench.truth.get(f"share/{number}/{rank}/{name}")) is not None
            }
            gradient = parameter.grad if scale == 1.0 else parameter.grad / scale
            found[name] = deviation(gradient, truth, shares)
        return found, tuple(missing)

    def _parameters(self, number: int) -> dict[str, Deviation]:
        if not (self.run.watched or self.run.compared):
            return {}
        return {
            name: deviation(parameter, self.bench.truth[f"parameter/{number}/{name}"])
            for name, parameter in named_parameters(self.model).items()
            if f"parameter/{number}/{name}" in self.bench.truth
        }


def _set_up(precision: strategy.Precision, run: Run, device: torch.device) -> None:
    """As a session does: of the whole process, so before each run."""
    PlanError.raise_for(
        strategy.check_precision(precision, run.layout, device.type, capability_of(device))
    )
    strategy.set_up_precision(precision)


def _options(run: Run, case: Case, train: TrainSpec) -> strategy.Options:
    """What the job asks for in its own layout; blocks are not compiled, as hooks watch them.

    Runs beside it are in layouts that the job's promises to DDP are not about.
    """
    compression = None
    if run.compression != "none":
        # From the second step on, as the first ones alone are few here.
        compression = Compression(kind=run.compression, rank=train.powersgd_rank, start_step=1)
    if run.layout != case.layout:
        return strategy.Options(compression=compression)
    return replace(strategy.options_of(train), compile=False, compression=compression)


def read_epochs(case: Case, meshes: Meshes) -> tuple[tuple[int, ...], ...]:
    """The samples that this rank reads in each of two epochs; a batch that runs over an epoch's
    end is split where the epoch ends."""
    layout, size = meshes.layout, case.num_samples
    seed = job_of(case).spec.train.seed
    batch = layout.global_batch
    read: tuple[list[int], list[int]] = [], []
    for step in range(-(-size * len(read) // batch)):
        for slots in rank_slots(layout, meshes.place.data):
            ids = sample_ids(step, slots, seed=seed, global_batch=batch, num_samples=size)
            for slot, sample in zip(slots, ids.tolist(), strict=True):
                epoch = (step * batch + slot) // size
                if epoch < len(read):
                    read[epoch].append(sample)
    return tuple(tuple(epoch) for epoch in read)
