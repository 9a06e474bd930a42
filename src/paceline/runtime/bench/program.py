"""What one rank of a bench does: train as in a run, for a while, with clocks around the steps."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.record.bench import Communication, RankTimes, Stretch
from paceline.record.run import RunFolder
from paceline.runtime import memory
from paceline.runtime.bench.clock import Clock, Line, PhaseMarks
from paceline.runtime.bench.communication import BEGIN, END, communication_of
from paceline.runtime.data import load_text
from paceline.runtime.models import import_named, make_model
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.recovery.member import Place, Settled
from paceline.runtime.sampling import Ids
from paceline.runtime.session import Session

OnProgress = Callable[[str], None]


class _Enough(BaseException):
    """All steps that were wanted are done: leaves a training function, whatever it catches."""


def bench_rank(
    run: RunFolder,
    device: torch.device,
    stretch: Stretch,
    *,
    on_progress: OnProgress = lambda line: None,
) -> RankTimes:
    """This rank's times. Collective.

    Args:
        run: Holds the job and its plan.
        device: This rank's.
        stretch: How many steps.
        on_progress: Told of every stretch that begins.
    """
    clock = Clock(device)
    steps = _Steps(clock, device, stretch, on_progress)
    rank = dist.get_rank()
    line: Any = Line(steps.finished_one)
    marks = PhaseMarks(clock, rank, line)
    place = Place(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=rank,
        generation=2,  # baselines of the data are told in a run's first
        device=device,
    )
    baseline_bytes = memory.held_bytes(device)
    session = Session(
        job=run.job(), plan=run.plan(), run=run, channel=line, member=Settled(place, marks)
    )
    with suppress(_Enough):
        _program(session, clock)
    return RankTimes(
        rank=rank,
        step_s=tuple(clock.step_s),
        phases={phase: tuple(seconds) for phase, seconds in clock.phases.items()},
        communication=steps.communication,
        peak_bytes=memory.peak_bytes(device) if steps.peak_bytes is None else steps.peak_bytes,
        baseline_bytes=baseline_bytes,
        backend=dist.get_backend(),
    )


def _program(session: Session, clock: Clock) -> None:
    """The job's own training function, else the built-in one without its evaluation."""
    name = session.job.spec.program
    if name is not None:
        import_named(session.job.folder, name)(session)
        return
    spec = session.job.spec
    samples, num_samples = _samples(session)

    def timed(ids: Ids) -> tuple[Tensor, Tensor]:
        before = clock.enter("data")
        batch = samples(ids)
        clock.enter(before)
        return batch

    model = session.build(make_model(session.job, session.plan.decoder))
    optimizer = make_optimizer(model, spec.train, session.ways)
    for step in session.steps(model, optimizer, tokens_per_sample=spec.data.seq_len):
        step.train(timed, num_samples)
        step.apply()


def _samples(session: Session) -> tuple[Callable[[Ids], tuple[Tensor, Tensor]], int]:
    """The job's text; where it has none, tokens drawn from each sample's number."""
    spec = session.job.spec
    if spec.data.path is not None or spec.data.corpus is not None:
        text, _ = load_text(session.job)
        return text.samples, text.num_samples
    vocab = session.plan.decoder.vocab if session.plan.decoder is not None else 256

    def drawn(ids: Ids) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(int(ids[0]))
        shape = (len(ids), spec.data.seq_len + 1)
        tokens_BS = torch.randint(0, vocab, shape, generator=generator)
        return tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()

    return drawn, 1 << 20


class _Steps:
    """Counts steps: first to warm up, then timed, on an accelerator again for phases, profiled."""

    def __init__(
        self, clock: Clock, device: torch.device, stretch: Stretch, on_progress: OnProgress
    ) -> None:
        self._clock = clock
        self._is_cpu = device.type == "cpu"
        self._device = device
        self._on_progress = on_progress
        self._profiled = stretch.profiled
        self._profile: Any = None
        self._timed_from = stretch.warm_up
        self._phases_from = stretch.warm_up + stretch.timed
        # The host's clock is right on a CPU; elsewhere phases take steps of their own.
        extra = 0 if self._is_cpu else max(3, stretch.timed // 4)
        self._profiled_from = self._phases_from + extra
        self._end = self._profiled_from + stretch.profiled
        self._num_done = 0
        self.communication: Communication | None = None
        self.peak_bytes: int | None = None
        on_progress(f"building, then {stretch.warm_up} steps to warm up")

    def finished_one(self) -> None:
        """Told at the end of every step."""
        done = self._num_done = self._num_done + 1
        is_timed = self._timed_from < done <= self._phases_from
        is_for_phases = self._phases_from < done <= self._profiled_from
        self._clock.end_step(
            keep_step=is_timed, keep_phases=is_timed if self._is_cpu else is_for_phases
        )
        if done == self._timed_from:
            self._on_progress(f"{self._phases_from - self._timed_from} timed steps")
        if done == self._phases_from and not self._is_cpu:
            self._clock.restart(waits=True)
        if done == self._profiled_from:
            self.peak_bytes = memory.peak_bytes(self._device)  # a profile takes some as well
        if done == self._profiled_from and self._profiled:
            self._on_progress(f"{self._profiled} steps under the profiler")
            self._clock.restart(waits=False)
            self._start_profile()
        if done == self._end:
            if self._profile is not None:
                self._stop_profile()
            raise _Enough

    def _start_profile(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not self._is_cpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()
        self._meet()
        self._mark(BEGIN)

    def _stop_profile(self) -> None:
        if not self._is_cpu:
            torch.cuda.synchronize(self._device)
        self._mark(END)
        self._meet()
        self._profile.stop()
        self.communication = communication_of(self._profile, self._profiled)

    def _meet(self) -> None:
        """All ranks begin and end together: starting a profiler takes each another time."""
        dist.all_reduce(torch.ones((), device=self._device))
        if not self._is_cpu:
            torch.cuda.synchronize(self._device)

    @staticmethod
    def _mark(name: str) -> None:
        with torch.profiler.record_function(name):
            pass
