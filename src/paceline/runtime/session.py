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

What the session does between those lines: the same initial weights on every rank; DDP or FSDP2
as planned; gradients reduced only where they must be; the global norm and clipping; a vote of all
ranks before anything is applied; the learning rate; metrics, evaluation and checkpoints; stopping
at a step boundary; and going on from the newest valid checkpoint with the same samples and the
same random numbers as if nothing had happened.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer imports it: here it counts as start-up, not as training
import torch.distributed as dist
from torch import nn

from paceline.control import messages as say
from paceline.errors import Problem, RunError
from paceline.plan import Plan
from paceline.record.metrics import MetricsLog, StepMetrics
from paceline.record.run import RunFolder
from paceline.runtime import memory, strategy
from paceline.runtime.channel import Channel
from paceline.runtime.checkpoint import Checkpointer, Saved, SaveFailed
from paceline.runtime.digest import state_digest
from paceline.runtime.faults import Faults
from paceline.runtime.optimizer import learning_rate_at
from paceline.runtime.sampling import batch_digest, rank_slots, sample_ids
from paceline.spec import Job

Evaluate = Callable[[], tuple[torch.Tensor | float, int]]
"""This rank's share of the held-out loss: the sum over its samples, and how many they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Who this worker is."""

    rank: int
    world_size: int
    local_rank: int
    generation: int
    """How many times the workers have been started, from 1."""

    device: torch.device


class Session:
    """One rank's part in a run. The worker makes it; a training function uses it."""

    def __init__(
        self,
        *,
        job: Job,
        plan: Plan,
        run: RunFolder,
        place: Place,
        channel: Channel,
        faults: Faults,
    ) -> None:
        self.job = job
        """What is asked; `job.spec` has the fields, `job.folder` is where its paths start."""

        self.plan = plan
        """What was chosen."""

        self.place = place
        """Who this worker is."""

        self.run = run
        """The run's folder, for files of your own."""

        self.interrupted = False
        """Whether the run stopped at a step boundary because somebody asked."""

        self.stop_wanted = False
        """Set it to stop the whole run at the next step boundary."""

        self.last_step = 0
        """Last finished step, also of the checkpoint gone on from."""

        self.held_out_loss: float | None = None
        """The newest held-out loss."""

        self.faults = faults
        self._channel = channel
        self._mesh = strategy.make_mesh(plan.layout, place.device.type)
        self._baseline_bytes = memory.held_bytes(place.device)
        self._digest: str | None = None
        self._tensorboard: _TensorBoard | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs."""
        return self.place.rank == 0

    def build(self, make_model: Callable[[], nn.Module]) -> nn.Module:
        """The model, split as planned, with the same initial weights on every rank.

        Args:
            make_model: Builds the whole model on the CPU. Called with torch's generator seeded
                from `train.seed`, so that every layout starts from the same weights.

        Leaves out: building larger models than one rank's host memory can hold.
        """
        self._baseline_bytes = memory.held_bytes(self.place.device)
        torch.manual_seed(self.job.spec.train.seed)
        model = make_model().to(self.place.device)
        return strategy.apply(model, self.plan.layout, self._mesh, precision=self.plan.precision)

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of the plan, for code that computes outside the model's forward."""
        return strategy.autocast(self.plan.precision, self.place.device, self.plan.layout)

    def note_baseline(self, name: str, loss: float) -> None:
        """Put a simple model's held-out loss beside ours, in the events and the report."""
        if self.is_first:
            self._channel.send(say.BaselineDone(name=name, loss=loss))

    def steps(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        evaluate: Evaluate | None = None,
        tokens_per_sample: int | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> Iterator["Step"]:
        """The steps that are left, each to be finished with `Step.apply`.

        Goes on from the newest valid checkpoint of the run, saves by the job's policy, and ends
        early, after a checkpoint, when somebody asks the run to stop.

        Args:
            model: As `build` returned it.
            optimizer: Over its parameters.
            evaluate: This rank's share of the held-out loss as `(sum, count)`. Called in eval
                mode without gradients, on every rank alike, as often as the job says.
            tokens_per_sample: For tokens/s; without it, samples/s are shown.
            schedule: Learning rate of a step, counted from 1. The job's schedule when left out.

        Raises:
            RunError: A step was left without `apply`, or too many in a row were refused.
            CheckpointError: There are checkpoints and none is valid.
        """
        spec = self.job.spec
        checkpointer = Checkpointer(self.run.checkpoints, spec.checkpoint)
        loop = _Loop(
            session=self,
            channel=self._channel,
            checkpointer=checkpointer,
            model=model,
            optimizer=optimizer,
            evaluate=evaluate,
            tokens_per_sample=tokens_per_sample,
            schedule=schedule or (lambda step: learning_rate_at(step, spec.train)),
        )
        yield from loop.run()
        self._digest = state_digest(model, optimizer)

    def completion(self) -> say.Completed:
        """The completion record of this rank, once the training function has returned.

        Raises:
            RunError: The function returned without going through the steps.
        """
        if self._digest is None:
            raise RunError(
                Problem(
                    code="R020",
                    what="the training function returned before its steps were through",
                    where=self.job.where("program"),
                    fix="iterate over session.steps(model, optimizer) to its end",
                )
            )
        return say.Completed(
            outcome="interrupted" if self.interrupted else "finished",
            step=self.last_step,
            world_size=dist.get_world_size(),
            state_digest=self._digest,
            held_out_loss=self.held_out_loss,
            baseline_bytes=self._baseline_bytes,
            peak_bytes=memory.peak_bytes(self.place.device),
        )

    def vote(self, *values: float) -> list[float]:
        """Sums over all ranks; every rank gets the same numbers."""
        ballot = torch.tensor(values, dtype=torch.float64, device=self.place.device)
        dist.all_reduce(ballot)
        return [float(value) for value in ballot.tolist()]


class Step:
    """One optimizer step on this rank: its samples, their gradients, and the update."""

    def __init__(
        self,
        number: int,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: float,
    ) -> None:
        self.number = number
        """From 1."""

        self.learning_rate = learning_rate
        """Of this step, already set in the optimizer."""

        self.loss = 0.0
        """Mean over the global batch, once applied."""

        self.grad_norm = 0.0
        """Global norm before clipping, once applied."""

        self.finished = False
        """Whether `apply` was called."""

        self.refused: str | None = None
        """Why all ranks refused to apply it, or None."""

        self.stop = False
        """Whether some rank was asked to stop, as all ranks agreed in the vote."""

        self.samples_digest = ""
        self.forward_s = self.backward_s = self.vote_s = self.apply_s = 0.0
        self._session = session
        self._model = model
        self._optimizer = optimizer
        self._loss = torch.zeros((), dtype=torch.float64, device=session.place.device)
        self._mark = time.perf_counter()

    def micro_batches(self, num_samples: int) -> Iterator[np.ndarray]:
        """The ids of this rank's samples, one array of `micro_batch` ids at a time.

        A pure function of (seed, step, slot): every sample of the data comes exactly once in an
        epoch, over all ranks together, and a resumed run sees what it would have seen.

        Args:
            num_samples: How many samples the data has; ids run from 0 to `num_samples - 1`.
        """
        session, layout = self._session, self._session.plan.layout
        seed, batch = session.job.spec.train.seed, layout.global_batch
        slots = rank_slots(session.place.rank, layout.data, batch, layout.micro_batch)
        self.samples_digest = batch_digest(
            self.number - 1, seed=seed, global_batch=batch, num_samples=num_samples
        )
        for index, part in enumerate(slots):
            strategy.set_gradient_sync(self._model, layout, is_last=index == len(slots) - 1)
            session.faults.pass_by("forward", self.number)
            yield sample_ids(
                self.number - 1, part, seed=seed, global_batch=batch, num_samples=num_samples
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's mean loss.

        Micro-batches and ranks have the same number of samples, so the mean of their means is
        the mean over the global batch.
        """
        self.forward_s += self._lap()
        self._session.faults.pass_by("backward", self.number)
        scaled = loss / self._session.plan.layout.accumulation
        scaled.backward()  # type: ignore[no-untyped-call]
        self._loss += scaled.detach()
        self.backward_s += self._lap()

    def apply(self) -> None:
        """Vote, clip and update: all ranks apply the step, or none does."""
        session = self._session
        train, place = session.job.spec.train, session.place
        norm = strategy.gradient_norm(self._model)
        norm_value, loss_value = float(norm), float(self._loss)
        bad = [0.0] * place.world_size
        bad[place.rank] = float(not math.isfinite(loss_value))
        stop, loss_sum, norms_bad, *losses_bad = session.vote(
            float(session.stop_wanted),
            loss_value,
            float(not math.isfinite(norm_value)),
            *bad,
        )
        self.stop = stop > 0
        self.loss, self.grad_norm = loss_sum / place.world_size, norm_value
        self.vote_s = self._lap()
        ranks = [rank for rank, flag in enumerate(losses_bad) if flag]
        if ranks:
            self.refused = f"the loss is not finite on rank(s) {', '.join(map(str, ranks))}"
        elif norms_bad:
            self.refused = f"the gradient norm is {norm_value}"
        else:
            if train.clip_norm is not None:
                strategy.scale_gradients(self._model, norm, train.clip_norm)
            session.faults.pass_by("apply", self.number)
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.apply_s = self._lap()
        self.finished = True

    @property
    def seconds(self) -> float:
        """The whole step, from its first sample to the update."""
        return self.forward_s + self.backward_s + self.vote_s + self.apply_s

    def _lap(self) -> float:
        now = time.perf_counter()
        self._mark, lap = now, now - self._mark
        return lap


class _Loop:
    """The step loop around the person's own code."""

    def __init__(
        self,
        *,
        session: Session,
        channel: Channel,
        checkpointer: Checkpointer,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Evaluate | None,
        tokens_per_sample: int | None,
        schedule: Callable[[int], float],
    ) -> None:
        self._session = session
        self._channel = channel
        self._checkpointer = checkpointer
        self._model = model
        self._optimizer = optimizer
        self._evaluate = evaluate
        self._unit = "tokens" if tokens_per_sample else "samples"
        self._units_per_step = session.plan.layout.global_batch * (tokens_per_sample or 1)
        self._schedule = schedule
        self._saved_step = 0
        self._refused_in_a_row = 0

    def run(self) -> Iterator[Step]:
        """Restore, then every step that is left, then the end's evaluation and checkpoint."""
        session = self._session
        first = self._restore()
        metrics = MetricsLog(session.run.metrics_file) if session.is_first else None
        board = _TensorBoard(session) if session.is_first else None
        if first == 1:
            self._evaluate_after(0)
        for number in range(first, session.job.spec.train.steps + 1):
            session.stop_wanted |= self._channel.stop_wanted
            step = self._begin(number)
            yield step
            self._check_finished(step)
            self._report(step)
            ended = step.stop or number == session.job.spec.train.steps
            if metrics is not None and board is not None:
                line = self._metrics(step)
                metrics.write(line)
                board.write(line)
            self._tell_of_save(self._checkpointer.poll())
            self._after(number, ended)
            if step.stop:
                session.interrupted = number < session.job.spec.train.steps
                break
        while (outcome := self._checkpointer.wait()) is not None:
            self._tell_of_save(outcome)
        if metrics is not None and board is not None:
            metrics.close()
            board.close()

    def _restore(self) -> int:
        """Bring back the newest valid state of the run; returns the first step to do."""
        session = self._session
        restored = self._checkpointer.restore_newest(self._model, self._optimizer)
        if restored.path is not None:
            session.last_step = self._saved_step = restored.step
            session.held_out_loss = restored.held_out_loss
        self._channel.send(
            say.Restored(
                first_step=session.last_step + 1,
                checkpoint=restored.path.name if restored.path is not None else None,
                refused=[(path.name, problem.what) for path, problem in restored.refused],
            )
        )
        return session.last_step + 1

    def _begin(self, number: int) -> Step:
        session = self._session
        # Dropout and the like: the same on a resumed run, different on every rank and step.
        seed = [session.job.spec.train.seed, number, session.place.rank]
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]))
        rate = self._schedule(number)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return Step(number, session, self._model, self._optimizer, rate)

    def _check_finished(self, step: Step) -> None:
        session = self._session
        if not step.finished:
            raise RunError(
                Problem(
                    code="R021",
                    what=f"step {step.number} was left without step.apply()",
                    where=session.job.where("program"),
                    fix="call step.apply() once at the end of every step",
                )
            )
        session.last_step = step.number
        self._refused_in_a_row = self._refused_in_a_row + 1 if step.refused else 0
        if step.refused is None:
            return
        if session.is_first:
            self._channel.send(say.StepVotedDown(step=step.number, reason=step.refused))
        if self._refused_in_a_row >= session.job.spec.train.max_refused_steps:
            raise RunError(
                Problem(
                    code="R022",
                    what=f"{self._refused_in_a_row} steps in a row were refused, the last because "
                    f"{step.refused}",
                    where=session.job.where("train.max_refused_steps"),
                    fix="lower train.learning_rate, lengthen train.warmup_steps, or use fp32",
                )
            )

    def _report(self, step: Step) -> None:
        rate = self._units_per_step / step.seconds
        self._channel.send(
            say.StepDone(step=step.number, loss=step.loss, tokens_per_s=rate, unit=self._unit)
        )

    def _after(self, number: int, ended: bool) -> None:
        """Evaluate and save where they are due."""
        plan = self._session.plan
        if number % plan.evaluate_every == 0 or number == self._session.job.spec.train.steps:
            self._evaluate_after(number)
        if number % plan.checkpoint_every == 0 or ended:
            self._save(number)

    def _evaluate_after(self, number: int) -> None:
        if self._evaluate is None:
            return
        session, start = self._session, time.perf_counter()
        self._model.eval()
        with torch.no_grad(), session.autocast():
            loss_sum, count = self._evaluate()
        self._model.train()
        total, num_samples = session.vote(float(loss_sum), float(count))
        session.held_out_loss = total / num_samples
        if session.is_first:
            seconds = time.perf_counter() - start
            self._channel.send(
                say.EvaluationDone(step=number, loss=session.held_out_loss, seconds=seconds)
            )

    def _save(self, number: int) -> None:
        """Start a checkpoint; it is written while training goes on."""
        if number == self._saved_step:
            return
        session = self._session
        self._checkpointer.start(
            number,
            self._model,
            self._optimizer,
            held_out_loss=session.held_out_loss,
            layout=session.plan.layout.name,
            on_phase=lambda phase: session.faults.pass_by("save", number),
        )
        self._saved_step = number

    def _tell_of_save(self, outcome: Saved | SaveFailed | None) -> None:
        if outcome is None or not self._session.is_first:
            return
        if isinstance(outcome, SaveFailed):
            self._channel.send(say.SaveError(step=outcome.step, reason=outcome.reason))
            return
        self._channel.send(
            say.SaveDone(
                step=outcome.step,
                checkpoint=outcome.path.name,
                num_bytes=outcome.num_bytes,
                stall_s=outcome.stall_s,
                write_s=outcome.write_s,
            )
        )

    def _metrics(self, step: Step) -> StepMetrics:
        place = self._session.place
        return StepMetrics(
            step=step.number,
            generation=place.generation,
            at=time.time(),
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            tokens_per_s=self._units_per_step / step.seconds,
            step_s=step.seconds,
            forward_s=step.forward_s,
            backward_s=step.backward_s,
            vote_s=step.vote_s,
            apply_s=step.apply_s,
            memory_bytes=memory.peak_bytes(place.device),
            applied=step.refused is None,
            samples_digest=step.samples_digest,
        )


class _TensorBoard:
    """The same numbers as TensorBoard event files, where the job asks for them."""

    def __init__(self, session: Session) -> None:
        self._writer = None
        if session.job.spec.metrics.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder: Path = session.run.path / "tensorboard"
            self._writer = SummaryWriter(str(folder), purge_step=session.last_step + 1)

    def write(self, line: StepMetrics) -> None:
        if self._writer is None:
            return
        for name, value in {
            "train/loss": line.loss,
            "train/grad_norm": line.grad_norm,
            "train/learning_rate": line.learning_rate,
            "speed/tokens_per_s": line.tokens_per_s,
            "speed/step_s": line.step_s,
        }.items():
            self._writer.add_scalar(name, value, line.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
