"""One rank's part in a run: build the model, go through the steps, and be rescued.

A training function gets a `Session` and reads like a plain PyTorch loop:

    def train(session: Session) -> None:
        model = session.build(MyModel)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in session.steps(model, optimizer):
            for ids in step.micro_batches(len(samples)):
                inputs, targets = samples[ids]
                step.backward(F.cross_entropy(model(inputs), targets))
            step.apply()

or, so that a layout may also split samples (context) and blocks (pipeline), with
`step.train(lambda ids: samples[ids], len(samples), loss_of=...)` for the inner loop.

What the session does between those lines: the same initial weights on every rank; the model split
as planned; gradients reduced only where they must be; the global norm and clipping; a vote of all
ranks before anything is applied; the learning rate; metrics, evaluation and checkpoints; stopping
at a step boundary; and resuming from the newest state that is anywhere with the same samples and
the same random numbers as if nothing had happened.

When a rank is lost the training function of every other one is left by an exception, and called
again in the same process once the ranks have met anew. A warm spare has called it as far as it gets
without knowing its rank: up to `build`, after the model is made. So what stands before `build`
should not ask for `place`, and what is costly there goes into `session.keep`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from paceline.choices import COMPRESSION_RISKS
from paceline.control import messages as say
from paceline.control.slots import Phase
from paceline.errors import PlanError, RunError
from paceline.job import Job
from paceline.job.evaluate_rules import kept_every, num_best
from paceline.job.train_rules import learning_rate_at
from paceline.parallel.shrink import part_of
from paceline.plan import Plan
from paceline.record import events
from paceline.record.run import RunFolder
from paceline.runtime import memory, strategy
from paceline.runtime._torch_private import load_compiler
from paceline.runtime.batches import Batches
from paceline.runtime.channel import Line
from paceline.runtime.checkpoint import Checkpointer
from paceline.runtime.devices import capability_of
from paceline.runtime.digest import state_digest
from paceline.runtime.evaluation import Evaluate
from paceline.runtime.faults import Faults
from paceline.runtime.generation import Generation, RunState
from paceline.runtime.initial.blueprint import Blueprints
from paceline.runtime.initial.fill import Filler
from paceline.runtime.loader import Loader, MapStyle
from paceline.runtime.loop import Loop
from paceline.runtime.pretrained import FromPretrained
from paceline.runtime.progress import Progress
from paceline.runtime.recovery.held import Held
from paceline.runtime.recovery.member import Membership, Place
from paceline.runtime.sampling import DataRank
from paceline.runtime.step import Step
from paceline.runtime.stream import Stateful, Stream, states

load_compiler()  # here it counts as start-up, not as training

_T = TypeVar("_T")


class Session:
    """One rank's part in a run. The worker makes it; a training function uses it."""

    def __init__(
        self,
        *,
        job: Job,
        plan: Plan,
        run: RunFolder,
        channel: Line,
        member: Membership,
        progress: Progress | None = None,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.job = job
        """What is asked; `job.spec` has the fields, `job.folder` is where its paths start."""

        self.plan = plan
        """What was chosen. Its layout is another one while there are fewer ranks than planned."""

        self.run = run
        """The run's folder, for files of your own."""

        self.channel = channel
        """The line to this worker's agent."""

        self.member = member
        """How this worker gets its place."""

        self.progress = progress or Progress(None)
        """Where this worker says where it is; its agent reads it."""

        self.held = Held()
        """What this worker keeps from generation to generation."""

        self.ways: strategy.Ways | None = None
        """How the model that was built may be split, where that is known."""

        self.state = RunState(
            scaler=strategy.LossScaler() if plan.precision == "fp16" else None,
            batches=Batches(plan.layout.global_batch),
        )
        """Where this rank stands in the run."""

        self._on_step = on_step
        self._faults = Faults(rank=-1, channel=channel)
        self._place: Place | None = None
        self._meshes: strategy.Meshes | None = None
        self._kept: dict[str, Any] = {}
        self._loaders: list[Loader] = []
        self._streams: dict[str, Stream] = {}
        self._blueprints = Blueprints()
        self._loop: Loop | None = None
        self._baseline_bytes: int | None = None
        self._digest: str | None = None
        self._is_through = False

    @property
    def place(self) -> Place:
        """Who this worker is. Collective, and waits, the first time in a generation: a warm spare
        waits here until it is needed."""
        if self._place is None:
            self._join()
        assert self._place is not None
        return self._place

    @property
    def meshes(self) -> strategy.Meshes:
        """Where this rank stands in the layout, and with whom it talks. Waits as `place` does."""
        if self._meshes is None:
            self._join()
        assert self._meshes is not None
        return self._meshes

    @property
    def generation(self) -> int:
        """Which set of workers this one is in; 0 before its first. Does not wait."""
        return self.member.generation

    @property
    def interrupted(self) -> bool:
        """Whether the run stopped at a step boundary because somebody asked."""
        return self.state.interrupted

    @property
    def stop_wanted(self) -> bool:
        """Set it to stop the whole run at the next step boundary."""
        return self.state.stop_wanted

    @stop_wanted.setter
    def stop_wanted(self, wanted: bool) -> None:
        self.state.stop_wanted = wanted

    @property
    def last_step(self) -> int:
        """Last finished step, also of the state that was resumed from."""
        return self.state.last_step

    @property
    def saved_step(self) -> int:
        """Step of the newest committed checkpoint."""
        return self.state.saved_step

    @property
    def held_out_loss(self) -> float | None:
        """The newest evaluation loss."""
        return self.state.held_out_loss

    def keep(self, name: str, make: Callable[[], _T]) -> _T:
        """What `make` returned the first time in this process: for what is costly and the same
        whatever the rank, such as data and tokenizers. The training function is called again after
        a failure, and by a warm spare before it has a rank."""
        if name not in self._kept:
            self._kept[name] = make()
        return cast("_T", self._kept[name])

    def loader(
        self,
        dataset: MapStyle,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Loader:
        """Batches of a map-style dataset, for `step.batches` or `step.train_on`: the samples that
        `step.micro_batches(len(dataset))` names, the same ones after a recovery and with any number
        of ranks.

        Args:
            dataset: Has a length, and samples by number. What a sample draws from torch's, numpy's
                or Python's generators follows from its place in the run.
            collate_fn: Samples -> a batch; torch's own when left out.
            num_workers: Processes of each rank that decode ahead, as for torch's DataLoader.
        """
        made = Loader(dataset, collate_fn=collate_fn, num_workers=num_workers)
        self._loaders.append(made)
        return made

    def stream(self, name: str, make: Callable[[int, int], Stateful]) -> Stream:
        """Batches of an iterable that keeps a state, such as torchdata's StatefulDataLoader, for
        `step.batches` or `step.train_on`. The state is saved in every checkpoint, and the same
        batches come after a recovery. Only the number of data ranks cannot change.

        Args:
            make: `(data rank, data ranks)` -> that rank's iterable at its beginning, with the state
                dict protocol. A batch is a micro-batch: `session.plan.layout.micro_batch` samples.
                Do not change a batch in place.
        """
        if name not in self._streams:
            self._streams[name] = Stream(name, make, self.run.checkpoints)
        return self._streams[name]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs."""
        return self.place.rank == 0

    def build(
        self, make_model: Callable[[], nn.Module], *, ways: strategy.Ways | None = None
    ) -> nn.Module:
        """The model, split as planned, with the same initial weights on every rank.

        Args:
            make_model: Builds the whole model on the CPU. Called with torch's, numpy's and Python's
                generators seeded from `train.seed`, and without memory for parameters: each rank
                then draws its own part, the same numbers in every layout; where ranks have the
                state from before a failure, nothing is drawn. A factory that looks at its
                parameters' numbers is called as it is, with the whole model in memory meanwhile.
            ways: How a model of your own may be split over tensor and pipeline ranks. Known ones
                need none, nor do layouts over data ranks alone.

        Raises:
            PlanError: The model cannot be split as planned; it says which module and number.
        """
        if self._baseline_bytes is None and self.plan.cluster.backend == "gloo":
            self._baseline_bytes = memory.held_bytes(torch.device("cpu"))
        self.progress.enter(Phase.BUILDING)
        train, plan = self.job.spec.train, self.plan
        options = strategy.options_of(
            train, loss_chunk=plan.loss_chunk, router_loss=plan.router_loss
        )
        if self.held.model is not None:
            place = self.place  # after which the model may be of no use any more
        live = self.held.model
        if live is not None:
            self.ways = ways or strategy.ways_of(live)
            layout, meshes, precision = self.plan.layout, self.meshes, self.precision
            kept = strategy.rejoin(
                live, layout, meshes, precision=precision, ways=self.ways, options=options
            )
            if kept is not None:
                return kept
        blueprint = self._blueprints.of(make_model, train.seed, self.member.generation)
        place = self.place
        if self._baseline_bytes is None:
            self._baseline_bytes = memory.held_bytes(place.device)
        whole = blueprint.take_model()
        draws, weights = not self.held.is_anywhere, None
        if isinstance(make_model, FromPretrained) and (draws or train.adapter):
            weights = make_model.weights_of(whole, digest=self.run.info().weights_digest or "")
        self.ways = ways or strategy.ways_of(whole)
        asked = train.gradient_compression
        if (risk := COMPRESSION_RISKS.get(asked)) is not None:
            self._note(f"train.gradient_compression {asked}: {risk}")
        if blueprint.why_whole is not None:
            why = f"its factory {blueprint.why_whole}"
            self._note(f"the model is whole in every rank's host memory before it is split: {why}")
        offloads = self.plan.layout.offload == "cpu"
        model = strategy.apply(
            whole,
            self.plan.layout,
            self.meshes,
            precision=self.precision,
            ways=self.ways,
            options=options,
            sends=draws,
            fill=Filler(
                blueprint,
                torch.device("cpu") if offloads else place.device,
                live=live,
                draws=draws,
                weights=weights,
            ),
            on_note=self._note,
        )
        memory.forget_peak(place.device)
        return model

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of the plan, for code that computes outside the model's forward."""
        return strategy.autocast(self.precision, self.place.device, self.plan.layout)

    @property
    def precision(self) -> strategy.Precision:
        """Type of the matrix multiplications."""
        return self.plan.precision

    def note_baseline(self, name: str, loss: float) -> None:
        """Put a simple model's evaluation loss beside ours, in the events and the report."""
        if math.isfinite(loss):
            self.report(events.BaselineEvaluated(name=name, loss=loss))

    def log(self, /, **values: Any) -> None:
        """Record numbers, texts and pictures of the step being done, each by its name.

        Numbers are under `logged` in the step's line of `metrics.jsonl`, curves of the report and
        of every sink. A `str` is a text. An array or tensor of uint8 (height x width, with 3 or 4
        colours last or first) and an image of PIL are pictures. Both are files in the run's
        `media/`, with bounds, and go to the sinks that show them; a picture is compressed in the
        step, which takes some 20 ms for a megapixel.

        Rank 0's values are recorded; those of other ranks are only checked. A tensor is copied at
        once and read at the step's end, when its value has arrived, which waits for the device. The
        last value of a name in a step is the one that counts. A step that a failure cuts off
        after its update may be recorded without them.

        Raises:
            RunError: There is no step, a name is one of ours, or a value is none of these.
        """
        keep = self._place is not None and self._place.rank == 0
        self.state.logged.add(values, keep=keep, where=self.job.where("program"))

    def report(self, event: events.Reported) -> None:
        """Send what all ranks have found out to the run's record, from the first rank."""
        if self.is_first:
            self.channel.send(say.ForRecord(event=event))

    def steps(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        evaluate: Evaluate | None = None,
        source_weights: Mapping[str, float] | None = None,
        tokens_per_sample: int | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> Iterator[Step]:
        """The steps that are left, each to be finished with `Step.apply`.

        Resumes from the newest valid checkpoint of the run, saves by the job's policy, and ends
        early, after a checkpoint, when somebody asks the run to stop.

        Args:
            evaluate: This rank's share of the evaluation loss as `(sum, count)`, or one for each
                source by its name. Called in eval mode without gradients, on every rank alike, as
                often as the job says.
            source_weights: Weight of each source in the mean of all; left out, targets count alike.
            schedule: Learning rate of a step, counted from 1. The job's schedule when left out.

        Raises:
            RunError: A step was left without `apply`, or too many in a row were refused.
            CheckpointError: There are checkpoints and none is valid.
        """
        spec, place, meshes = self.job.spec, self.place, self.meshes  # which set the plan's layout
        checkpointer = Checkpointer(
            self.run.checkpoints,
            replace(spec.checkpoint, keep_best=num_best(spec), keep_every=kept_every(spec)),
            opening=self.member.opening,
            others=partial(states, self._streams),
        )
        rank = DataRank(
            seed=spec.train.seed,
            layout=self.plan.layout,
            rank=meshes.place.data,
            batches=self.state.batches,
        )
        for loader in self._loaders:
            loader.join(rank, place.device)
        for stream in self._streams.values():
            stream.join(rank)
        loop = Loop(
            here=Generation(
                job=self.job,
                plan=self.plan,
                run=self.run,
                line=self.channel,
                member=self.member,
                progress=self.progress,
                faults=self._faults,
                held=self.held,
                state=self.state,
                place=place,
                meshes=meshes,
                on_step=self._on_step,
            ),
            checkpointer=checkpointer,
            model=model,
            optimizer=optimizer,
            evaluate=evaluate,
            source_weights=source_weights or {},
            tokens_per_sample=tokens_per_sample,
            schedule=schedule or (lambda step: learning_rate_at(step, spec.train)),
        )
        self._loop = loop
        yield from loop.run()
        self.progress.enter(Phase.ENDING)
        digest = state_digest(model, optimizer) if spec.recovery.final_digest else None
        self.member.settle(place.device)
        self._digest, self._is_through = digest, True

    def complete(self) -> None:
        """Leave the completion record of this rank, once the training function has returned.

        All ranks are through before any says so. Collective.

        Raises:
            RunError: The function returned without going through the steps.
        """
        if not self._is_through:
            raise RunError.of(
                code="R020",
                what="the training function returned before its steps were through",
                where=self.job.where("program"),
                fix="iterate over session.steps(model, optimizer) to its end",
            )
        record = say.Completed(
            outcome="interrupted" if self.state.interrupted else "finished",
            step=self.state.last_step,
            saved_step=self.state.saved_step,
            world_size=dist.get_world_size(),
            state_digest=self._digest,
            held_out_loss=self.state.held_out_loss,
            baseline_bytes=self._baseline_bytes,
            peak_bytes=memory.peak_bytes(self.place.device),
        )
        dist.barrier()
        self.member.settle(self.place.device)
        self.channel.send(record)

    def park(self, *, planned: bool = False) -> None:
        """Leave this generation, with what this worker holds, and report it."""
        self.progress.interrupted()
        for loader in self._loaders:
            loader.leave()
        self._loaders.clear()
        if self._loop is not None:
            self._loop.leave()
        self._loop = self._digest = None
        self._is_through = False
        if self._meshes is not None:
            strategy.clear_dtensor_caches(self._meshes)
        self._place = self._meshes = None
        self.state.interrupted = False
        self.member.leave()
        applied = self.state.last_step if self.held.is_whole else -1
        self.channel.send(say.Parked(applied_step=applied, planned=planned))

    @property
    def step_at(self) -> int | None:
        """Number of the step that is being done; None between two."""
        step = self.state.step
        return None if step is None or step.finished else step.number

    @property
    def samples_at(self) -> list[int]:
        """Ids of the micro-batch that is being done."""
        step = self.state.step
        return [] if step is None or step.finished else step.samples_at

    def _join(self) -> None:
        place, self._faults = self.member.join()
        layout = self.member.layout or self.plan.layout
        if layout != self.plan.layout:
            self.plan = replace(self.plan, layout=layout)
        self.held.drop_if_other_part(part_of(layout, place.rank))
        state = self.state
        state.told_step = self.held.exchange_standing(state.last_step, state.told_step)
        with self.member.opening():
            meshes = strategy.make_meshes(self.plan.layout, place.device.type)
        # The world that answered, not the one that was asked for.
        self.channel.send(say.Met(world_size=len(self.held.applied), backend=dist.get_backend()))
        PlanError.raise_for(
            strategy.check_precision(
                self.precision, self.plan.layout, place.device.type, capability_of(place.device)
            )
        )
        strategy.set_up_precision(self.precision)
        self._place, self._meshes = place, meshes
        self.progress.enter(Phase.BUILDING)

    def _note(self, text: str) -> None:
        """Record what is to be known of the run: once, not after each restart."""
        if self.place.generation == 1:
            self.report(events.Noted(text=text))
