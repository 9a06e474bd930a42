"""What one rank of a bench does: train as in a run, for a while, and keep the times of the steps.

Where a step's time goes is what the step itself measures (`phase_clock.py`): by the host's clock on
a CPU, by the device's events on an accelerator.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.prepare import find_data
from paceline.record.bench import PHASES, Communication, RankTimes, Stretch
from paceline.record.run import RunFolder
from paceline.runtime import memory
from paceline.runtime.bench.communication import BEGIN, END, communication_of
from paceline.runtime.channel import NoAgent
from paceline.runtime.data import Samples, TextData, load_samples
from paceline.runtime.faults import Faults
from paceline.runtime.language_model import train_on
from paceline.runtime.models import import_named
from paceline.runtime.phase_clock import PartTimes
from paceline.runtime.recovery.member import Place, Settled
from paceline.runtime.session import Session
from paceline.runtime.step import Step

OnProgress = Callable[[str], None]

_DRAWN = 1024
"""Samples where a job names no data. Their number changes no time."""


class _Enough(BaseException):
    """All steps that were wanted are done: leaves a training function, whatever it catches."""


def bench_rank(
    run: RunFolder,
    device: torch.device,
    stretch: Stretch,
    *,
    on_progress: OnProgress = lambda line: None,
) -> RankTimes:
    """This rank's times. Collective."""
    steps = _Steps(device, stretch, on_progress)
    rank, line = dist.get_rank(), NoAgent()
    place = Place(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=rank,
        generation=2,  # baselines of the data are told in a run's first
        device=device,
    )
    baseline_bytes = memory.held_bytes(device)
    session = Session(
        job=run.job(),
        plan=run.plan(),
        run=run,
        channel=line,
        member=Settled(place, Faults(rank=rank, channel=line)),
        on_step=steps.finished_one,
    )
    with suppress(_Enough):
        _program(session)
    return RankTimes(
        rank=rank,
        step_s=tuple(steps.step_s),
        phases={phase: tuple(seconds) for phase, seconds in steps.phases.items()},
        communication=steps.communication,
        peak_bytes=memory.peak_bytes(device) if steps.peak_bytes is None else steps.peak_bytes,
        baseline_bytes=baseline_bytes,
        backend=dist.get_backend(),
    )


def _program(session: Session) -> None:
    name = session.job.spec.program
    if name is not None:
        import_named(session.job.folder, name)(session)
        return
    train_on(session, _samples(session), None)


def _samples(session: Session) -> Samples:
    seq_len, data = session.job.spec.data.seq_len, find_data(session.job)
    if data is not None:
        return load_samples(data, seq_len)[0]
    vocab = session.plan.decoder.vocab if session.plan.decoder is not None else 256
    drawn = np.random.default_rng(0).integers(min(vocab, 256), size=_DRAWN * seq_len + 1)
    return TextData(text=drawn.astype(np.uint8), seq_len=seq_len)


def phases_of(times: PartTimes, step_s: float) -> dict[str, float]:
    """The seconds of each phase; what the step does not count as its own is bookkeeping.

    >>> phases_of(PartTimes(forward_s=1.0, backward_s=2.0, apply_s=0.5), 4.0)["bookkeeping"]
    0.5
    """
    parts = (times.data_s, times.forward_s, times.backward_s, times.vote_s, times.apply_s)
    spent = [seconds or 0.0 for seconds in parts]
    return dict(zip(PHASES, [*spent, max(0.0, step_s - sum(spent))], strict=True))


class _Steps:
    """Counts steps: first to warm up, then timed, then profiled."""

    def __init__(self, device: torch.device, stretch: Stretch, on_progress: OnProgress) -> None:
        self._is_cpu = device.type == "cpu"
        self._device = device
        self._on_progress = on_progress
        self._stretch = stretch
        self._profile: Any = None
        self._num_done = 0
        self._vote_s = 0.0
        self._ended_at = time.perf_counter()
        self.step_s: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.communication: Communication | None = None
        self.peak_bytes: int | None = None
        on_progress(f"building, then {stretch.warm_up} steps to warm up")

    def finished_one(self, step: Step) -> None:
        """Called at the end of every step."""
        now = time.perf_counter()
        step_s, self._ended_at = now - self._ended_at, now
        self._num_done += 1
        stretch, timed = self._stretch, self._num_done - self._stretch.warm_up
        if 0 < timed <= stretch.timed:
            self.step_s.append(step_s)
            for phase, seconds in phases_of(step.times, step_s).items():
                self.phases[phase].append(seconds)
        if timed > stretch.timed:
            self._vote_s += step.times.vote_s or 0.0
        if timed == 0:
            self._on_progress(f"{stretch.timed} timed steps")
        if timed == stretch.timed:
            self.peak_bytes = memory.peak_bytes(self._device)  # a profile takes some as well
            if stretch.profiled:
                self._on_progress(f"{stretch.profiled} steps under the profiler")
                self._start_profile()
        if timed == stretch.timed + stretch.profiled:
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
        seen = communication_of(self._profile, self._stretch.profiled)
        if seen is not None:
            self.communication = replace(seen, vote_s=self._vote_s / self._stretch.profiled)

    def _meet(self) -> None:
        """All ranks begin and end together: starting a profiler takes each another time."""
        dist.all_reduce(torch.ones((), device=self._device))
        if not self._is_cpu:
            torch.cuda.synchronize(self._device)

    @staticmethod
    def _mark(name: str) -> None:
        with torch.profiler.record_function(name):
            pass
