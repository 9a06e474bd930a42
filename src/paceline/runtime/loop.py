"""The step loop around a training function: restore, step, record, evaluate, save, stop."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

import torch
from torch import nn

from paceline.control import messages as say
from paceline.control.slots import Phase
from paceline.errors import RunError
from paceline.estimate import mfu_at
from paceline.parallel import replicas_of
from paceline.parallel.shrink import part_of
from paceline.record import events as log
from paceline.record.best import Best
from paceline.record.checkpoints import newest_step, set_aside
from paceline.record.media import MediaLog
from paceline.record.metrics import MetricsLog, StepMetrics
from paceline.record.run import training_digest
from paceline.runtime import memory
from paceline.runtime.checkpoint import Checkpointer, Restored, Saved, SaveFailed
from paceline.runtime.checkpoint._all_ranks import from_first, gather
from paceline.runtime.digest import state_digest
from paceline.runtime.evaluation import Evaluate, Evaluation
from paceline.runtime.generation import Generation, begin_batches
from paceline.runtime.recovery.heal import adopt, receive, send
from paceline.runtime.recovery.held import Regrouping, StartOver
from paceline.runtime.recovery.newest import RecoveryPlan, plan_recovery
from paceline.runtime.recovery.safekeeping import Safekeeping
from paceline.runtime.recovery.verdict import Verdict
from paceline.runtime.run_hooks import RunHooks
from paceline.runtime.step import Step
from paceline.runtime.step_printer import StepPrinter
from paceline.runtime.trainer import Trainer
from paceline.units import numbered


class Loop:
    """The step loop around the person's own code."""

    def __init__(
        self,
        *,
        here: Generation,
        checkpointer: Checkpointer,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        evaluate: Evaluate | None,
        source_weights: Mapping[str, float],
        tokens_per_sample: int | None,
        schedule: Callable[[int], float],
    ) -> None:
        self._here = here
        self._checkpointer = checkpointer
        self._model = model
        self._optimizer = optimizer
        self._unit = "tokens" if tokens_per_sample else "samples"
        self._units_per_step = here.plan.layout.global_batch * (tokens_per_sample or 1)
        self._printer = StepPrinter(here.job.spec.train.steps, self._unit)
        self._schedule = schedule
        self._rate_factor = 1.0
        self._evaluation = Evaluation(here, model, evaluate, source_weights)
        self._job_digest = training_digest(here.job)
        self._metrics_log: MetricsLog | None = None
        self._media = MediaLog(here.run.path)
        self._started_save = 0
        layout, train = here.plan.layout, here.job.spec.train
        self._safekeeping = Safekeeping(
            here,
            model,
            optimizer,
            # What lies in memory is of a rank in a layout.
            job_digest=f"{self._job_digest} {layout.name}",
        )
        self._trainer = Trainer(
            model=model,
            optimizer=optimizer,
            layout=layout,
            meshes=here.meshes,
            device=here.place.device,
            precision=here.plan.precision,
            seed=train.seed,
            clip_norm=train.clip_norm,
            scaler=here.state.scaler,
            hooks=RunHooks(here, self._safekeeping),
            where=here.job.where("program"),
            batches=here.state.batches,
        )

    def run(self) -> Iterator[Step]:
        """Restore, then every step that is left, then the end's evaluation and checkpoint."""
        here, state = self._here, self._here.state
        last = here.job.spec.train.steps
        every = here.job.spec.drill.digest_every
        self._evaluation.check()
        first = self._restore()
        self._metrics_log = metrics = MetricsLog(here.run.metrics_file) if here.is_first else None
        if state.newest_line is not None and metrics is not None:
            metrics.write_missing(state.newest_line)
        lost_save, here.held.lost_save = here.held.lost_save, 0
        if lost_save:
            reason = "a rank was lost; it is saved anew"
            here.report(log.CheckpointFailed(step=lost_save, reason=reason))
        if state.last_step > state.told_step or lost_save:
            self._after(state.last_step, ended=bool(lost_save) or state.last_step == last)
        elif first == 1:
            self._evaluation.measure(0)
        while state.last_step < last and not self._evaluation.is_over():
            number = state.last_step + 1
            step = self._begin(number)
            if number in here.member.skipped:
                self._leave_out(step)
            else:
                yield step
                self._check_finished(step)
            if step.wrong is not None:
                self._mend(step.wrong)
                continue
            here.faults.pass_by("applied", number)
            if step.saves or step.regroup == "save":
                here.line.forget_save()
            self._report(step)
            ended = step.stop or number == last
            state.logged.read(here.settle)
            state.newest_line = self._metrics(step)
            if every and number % every == 0:
                digest = state_digest(self._model, self._optimizer)
                here.settle()
                state.newest_line = replace(state.newest_line, state_digest=digest)
            if metrics is not None:
                self._keep_media(state.newest_line)
                metrics.write(state.newest_line)
            self._tell_of_save(self._checkpointer.poll())
            if ended or self._is_save_due(number, step) or self._may_be_best(number):
                wrong = self._safekeeping.check()
                if wrong is not None:
                    self._mend(wrong)
                    continue
            self._safekeeping.name_suspects()
            self._after(number, ended, step)
            if self._evaluation.is_over():
                break
            if step.stop:
                state.interrupted = number < last
                break
            if step.regroup is not None and number < last:
                self._leave_together(step)
        if state.last_step < last and not state.interrupted:
            self._evaluation.report_early_end()
        here.progress.enter(Phase.SAVE)
        self._finish_saves()
        self._checkpointer.wait_for_copies()
        self._tell_of_save(None)
        self._safekeeping.close()
        if metrics is not None:
            metrics.close()
            self._media.close()

    def _leave_together(self, step: Step) -> NoReturn:
        if step.regroup == "save":
            self._save(step.number)
        self._finish_saves()
        raise Regrouping

    def leave(self) -> None:
        """The generation is over: give up what waits for other ranks."""
        if self._metrics_log is not None:
            self._metrics_log.close()
            self._media.close()
        here, state = self._here, self._here.state
        step = state.step
        abandoned = self._checkpointer.abandon()
        if abandoned is not None:
            here.held.lost_save = abandoned.step
        if step is not None and step.finished and state.last_step == step.number:
            state.newest_line = self._metrics(step)
        here.held.leave(step)
        state.step = None
        state.logged.close()

    def _restore(self) -> int:
        """Bring back the newest state there is; returns the first step to do."""
        here, state, held = self._here, self._here.state, self._here.held
        here.progress.enter(Phase.RESTORING)
        here.faults.pass_by("restore", 0)
        source = self._bring_back()
        checkpoint: str | None = None
        refused: list[tuple[str, str]] = []
        self._safekeeping.open()
        if source is None:
            held.decided = None
            held.is_torn = True  # the model may lie in the live one's memory: it is overwritten
            is_first = here.place.rank == 0
            saved = from_first(newest_step(here.run.checkpoints) if is_first else 0, None)
            if self._safekeeping.recall(after=saved) is not None:
                source = "memory"
                state.newest_line = None
                state.saved_step = saved
        if source is None:
            restored = self._load_checkpoint()
            source = "initial" if restored.path is None else "checkpoint"
            refused = [(path.name, problem.what) for path, problem in restored.refused]
            checkpoint = restored.path.name if restored.path is not None else None
        self._started_save = state.saved_step
        here.settle()  # also of the numbers that rank 0 has sent while the model was built
        self._rate_factor = begin_batches(here, self._optimizer)
        held.hold(self._model, self._optimizer, part_of(here.plan.layout, here.place.rank))
        here.faults.flips_in(self._model, self._optimizer)
        here.line.send(
            say.Restored(
                first_step=state.last_step + 1,
                source=source,
                checkpoint=checkpoint,
                refused=refused,
            )
        )
        here.progress.enter(Phase.BOUNDARY)
        return state.last_step + 1

    def _load_checkpoint(self) -> Restored:
        """Restore the newest valid checkpoint, or be at the seed's state in a new run.

        Raises:
            StartOver: There is none, and the model is no longer as the seed makes it.
        """
        here, state, held = self._here, self._here.state, self._here.held
        restored = self._checkpointer.restore_newest(
            self._model, self._optimizer, job_digest=self._job_digest
        )
        if restored.path is None and held.is_anywhere:
            held.forget()
            raise StartOver
        saved = restored.manifest
        state.last_step = state.saved_step = state.told_step = saved.step
        state.newest_line = None
        state.best = saved.best or Best()
        state.batches.changes = saved.batches
        if restored.path is not None:
            if here.is_first:
                set_aside([path for path, _ in restored.refused])
            state.held_out_loss = saved.held_out_loss
            state.load_scaler(saved.loss_scaler)
        return restored

    def _mend(self, wrong: Verdict) -> None:
        """Make a state right that was found wrong; `state.last_step` is the step it has then."""
        here, state = self._here, self._here.state

        def go_back() -> int:
            self._finish_saves()
            here.held.applied = [state.last_step] * here.place.world_size
            step = self._load_checkpoint().step
            self._started_save = state.saved_step
            self._rate_factor = begin_batches(here, self._optimizer)
            return step

        here.progress.enter(Phase.RESTORING)
        self._safekeeping.repair(wrong, go_back)
        here.held.decided = None

    def _bring_back(self) -> say.Source | None:
        here, state, held = self._here, self._here.state, self._here.held
        if not held.is_anywhere:
            return None
        rank = here.place.rank
        state.last_step = self._state_step()  # what was left out is left out again, by all
        known = gather((held.standing(state.last_step), held.decided), None)
        plan = plan_recovery([standing for standing, _ in known], replicas_of(here.plan.layout))
        if plan.lost:
            self._say_lost(plan)
            return None
        outcomes = (outcome for _, outcome in known if outcome and outcome.step == plan.step)
        outcome = next(outcomes, None)
        if held.pending is not None:
            if outcome is not None and rank in plan.rolled:
                held.pending.roll_forward(outcome)
                self._count_refusal(held.pending)
                state.newest_line = self._metrics(held.pending)
            else:
                held.pending.undo()
            held.pending = None
        held.decided = outcome
        if held.is_whole and state.last_step == plan.step:
            adopt(held.live(), (self._model, self._optimizer))
        return self._exchange(plan)

    def _state_step(self) -> int:
        """The last step that was not left out: the state is its."""
        step = self._here.state.last_step
        while step in self._here.member.skipped:
            step -= 1
        return step

    def _exchange(self, plan: RecoveryPlan) -> say.Source:
        here, model, optimizer = self._here, self._model, self._optimizer
        rank, held, state = here.place.rank, here.held, here.state
        source: say.Source = "own"
        for route in plan.routes:
            if route.source == rank:
                send(route.to, model, optimizer, state.state_dict())
            elif route.to == rank:
                source = "replica"
                # Until all of it has come, what is overwritten is the state of no step.
                held.is_torn = True
                received = receive(route.source, model, optimizer)
                here.settle()
                state.load_state_dict(received)
        return source

    def _say_lost(self, plan: RecoveryPlan) -> None:
        text = (
            f"no living rank has the state of {numbered('rank', plan.lost)} at step {plan.step}: "
        )
        self._here.report(log.Noted(text=text + "all ranks resume from an older one"))

    def _begin(self, number: int) -> Step:
        here, state = self._here, self._here.state
        here.faults.pass_by("start", number)
        here.progress.begin_step(number)
        state.step = Step(number, self._trainer, self._schedule(number) * self._rate_factor)
        state.logged.open()
        return state.step

    def _check_finished(self, step: Step) -> None:
        here, state = self._here, self._here.state
        if not step.finished:
            raise RunError.of(
                code="R021",
                what=f"step {step.number} was left without step.apply()",
                where=here.job.where("program"),
                fix="call step.apply() once at the end of every step",
            )
        self._count_refusal(step)
        if step.refused is None:
            return
        here.report(log.StepRefused(step=step.number, reason=step.refused))
        if state.refused_in_a_row >= here.job.spec.train.max_refused_steps:
            raise RunError.of(
                code="R022",
                what=f"{state.refused_in_a_row} steps in a row were refused, the last "
                f"because {step.refused}",
                where=here.job.where("train.max_refused_steps"),
                fix="lower train.learning_rate, lengthen train.warmup_steps, or use fp32",
            )

    def _leave_out(self, step: Step) -> None:
        """A step with a poison batch: left out by every rank alike, as all were told of it."""
        samples = self._here.member.skipped[step.number]
        self._here.state.last_step = step.number
        step.leave_out(f"poison batch, sample ids {', '.join(map(str, samples))}")
        if step.refused is not None:
            self._here.report(log.StepRefused(step=step.number, reason=step.refused))

    def _count_refusal(self, step: Step) -> None:
        state = self._here.state
        if not step.overflowed:  # fp16 tries lower scales until one fits
            state.refused_in_a_row = state.refused_in_a_row + 1 if step.refused else 0

    def _report(self, step: Step) -> None:
        self._here.on_step(step)
        rate = self._units_per_step / step.seconds
        self._printer.step_done(step.number, step.loss, rate)
        self._here.line.send(
            say.StepDone(
                step=step.number,
                loss=step.loss,
                tokens_per_s=rate,
                unit=self._unit,
                own_s=step.own_s,
                own_loss=step.own_loss,
            )
        )

    def _after(self, number: int, ended: bool, step: Step | None = None) -> None:
        """Evaluate and save where they are due; the best so far is saved wherever it is found."""
        evaluation = self._evaluation
        if evaluation.is_due(number):
            evaluation.measure(number)
        ended = ended or evaluation.is_over()
        if ended or self._is_save_due(number, step) or evaluation.is_best(number):
            self._save(number)
        if evaluation.is_kept_for_outputs(number):
            # A rank that dies meanwhile has it saved again: no later state could be saved as it.
            self._here.progress.enter(Phase.SAVE)
            self._finish_saves()
            self._here.progress.enter(Phase.BOUNDARY)
        self._here.state.told_step = number

    def _is_save_due(self, number: int, step: Step | None) -> bool:
        is_asked_for = step is not None and step.saves
        is_kept = self._evaluation.is_kept_for_outputs(number)
        return is_asked_for or is_kept or number % self._here.plan.checkpoint_every == 0

    def _may_be_best(self, number: int) -> bool:
        return self._evaluation.counts_best and self._evaluation.is_due(number)

    def _save(self, number: int) -> None:
        """Start a checkpoint; it is written while training goes on."""
        if number <= self._started_save:  # repeated after a state was found wrong
            return
        here, state = self._here, self._here.state
        here.progress.enter(Phase.SAVE)
        self._checkpointer.start(
            number,
            self._model,
            self._optimizer,
            held_out_loss=self._evaluation.loss_after(number),
            layout=here.plan.layout.name,
            mesh=here.plan.layout.degrees,
            seed=here.job.spec.train.seed,
            samples=state.batches.start(number + 1),
            batches=state.batches.changes,
            job_digest=self._job_digest,
            loss_scaler=state.scaler.state_dict() if state.scaler is not None else None,
            best=state.best if self._evaluation.counts_best else None,
            on_phase=lambda phase: here.faults.pass_by("save", number),
        )
        self._started_save = number
        here.progress.enter(Phase.BOUNDARY)

    def _finish_saves(self) -> None:
        while (outcome := self._checkpointer.wait()) is not None:
            self._tell_of_save(outcome)

    def _tell_of_save(self, outcome: Saved | SaveFailed | None) -> None:
        if isinstance(outcome, Saved):
            self._here.state.saved_step = outcome.step
        for copied in self._checkpointer.take_copies():
            self._here.report(copied)
        if isinstance(outcome, SaveFailed):
            self._here.report(log.CheckpointFailed(step=outcome.step, reason=outcome.reason))
        elif outcome is not None:
            self._here.report(
                log.CheckpointSaved(
                    step=outcome.step,
                    checkpoint=outcome.path.name,
                    num_bytes=outcome.num_bytes,
                    stall_s=outcome.stall_s,
                    write_s=outcome.write_s,
                )
            )

    def _metrics(self, step: Step) -> StepMetrics:
        place, plan = self._here.place, self._here.plan
        work_now = plan.layout.global_batch / self._here.state.batches.first
        ranks_now = place.world_size / plan.cluster.num_ranks / work_now
        return StepMetrics(
            step=step.number,
            generation=place.generation,
            at=time.time(),
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            loss_scale=None if (scaler := self._here.state.scaler) is None else scaler.factor,
            tokens_per_s=self._units_per_step / step.seconds,
            step_s=step.seconds,
            data_s=step.times.data_s,
            forward_s=step.times.forward_s,
            backward_s=step.times.backward_s,
            vote_s=step.times.vote_s,
            apply_s=step.times.apply_s,
            mfu=mfu_at(plan.estimate, step.seconds, ranks_now=ranks_now),
            memory_bytes=memory.peak_bytes(place.device),
            reserved_bytes=memory.reserved_bytes(place.device),
            applied=step.refused is None,
            accuracy=step.accuracy,
            samples_digest=step.samples_digest,
            state_digest=None,
            logged=dict(self._here.state.logged.numbers),
        )

    def _keep_media(self, line: StepMetrics) -> None:
        media = self._here.state.logged.media
        reason = self._media.write(line.step, line.generation, line.at, media)
        if reason is not None:
            self._here.report(log.Noted(text=reason))
