"""Run a soak: random schedules of faults, many in one long run.

Schedule after schedule hits the same processes, which live on between them. Every schedule has a
stretch of steps, and `check/drill/soak.py` judges it from the run's record. A line a schedule goes
into `soak.jsonl`, so that the same command resumes where it stopped.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from paceline.job import Job
from paceline.job.fault_grammar import shifted
from paceline.launch.drill import Ran, run_reference, run_to_end
from paceline.plan import Plan
from paceline.prepare import TrainedOn
from paceline.record.metrics import read_metrics
from paceline.record.run import RunFolder, create_run
from paceline.record.soak import FILE, SoakLine, append_soak_line, read_passed

STRETCH = 12
"""Steps of a schedule. A guess: room for five faults and a quiet step at the end."""

BATCH = 20
"""Schedules in one run: what is lost when one of them ends it, and what the undisturbed run has to
be as long as. A guess: with fewer, starting a run costs more than its steps."""

_RESTARTS = 20
"""`recovery.max_restarts` of a soak: several faults may hit one step."""

_LOOK_EVERY_S = 10.0


class Judge(Protocol):
    """Judges one schedule's stretch of a run, against the undisturbed run."""

    def __call__(
        self, ran: Ran, calm: Ran, *, seed: int, faults: Sequence[str], place: int
    ) -> SoakLine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What is run again and again."""

    job: Job
    """With as many steps as a batch takes: see `soak_job`."""

    plan: Plan
    data: TrainedOn | None
    schedule: Callable[[int], Sequence[str]]
    """Seed -> the faults of its schedule, with steps from 1."""

    judge: Judge
    runs: Path
    limit_s: float

    @property
    def ledger(self) -> Path:
        """Where the lines are kept."""
        return self.runs / FILE


def soak_job(job: Job, num: int) -> Job:
    """The job with as many steps as a batch of `num` schedules takes, and digests between them."""
    spec = job.spec
    train = replace(spec.train, steps=STRETCH * min(BATCH, num))
    drill = replace(spec.drill, kill=[], faults=[], digest_every=STRETCH)
    recovery = replace(spec.recovery, max_restarts=_RESTARTS)
    return replace(job, spec=replace(spec, train=train, drill=drill, recovery=recovery))


def run_soak(
    soak: Soak,
    *,
    num: int,
    seed: int,
    on_note: Callable[[str], None],
    on_line: Callable[[SoakLine, float], None],
) -> list[SoakLine]:
    """Run what is not verified yet of `num` schedules, with seeds from `seed`.

    Returns:
        The lines of all schedules, also of those that an earlier soak has verified.
    """
    soak.runs.mkdir(parents=True, exist_ok=True)
    done = read_passed(soak.ledger)
    calm = run_reference(
        soak.job, soak.plan, soak.runs, soak.data, on_event=lambda _: None, limit_s=soak.limit_s
    )
    on_note(f"undisturbed  {calm.run.path}, sha256 {(calm.digest or '')[:16]}")
    lines = [line for number, line in sorted(done.items()) if seed <= number < seed + num]
    if lines:
        on_note(f"{len(lines)} were verified before: {soak.ledger}")
    left = num - len(lines)
    ahead = (number for number in range(seed, seed + num) if number not in done)
    again: list[int] = []
    began, fresh = time.monotonic(), 0
    while left:
        batch = again + list(islice(ahead, min(BATCH, num) - len(again)))
        verified = set()
        for line in _run_batch(soak, calm, batch, on_note):
            append_soak_line(soak.ledger, line)
            verified.add(line.seed)
            fresh, left = fresh + 1, left - 1
            on_line(line, left * (time.monotonic() - began) / fresh)
            lines.append(line)
        again = [number for number in batch if number not in verified]
    return lines


def _run_batch(
    soak: Soak, calm: Ran, seeds: Sequence[int], on_note: Callable[[str], None]
) -> Iterator[SoakLine]:
    """Lines of the schedules of one run, up to the first that failed: those after it have not been
    judged, and are run again."""
    schedules = {seed: soak.schedule(seed) for seed in seeds}
    faults = [
        shifted(text, STRETCH * place)
        for place, seed in enumerate(seeds)
        for text in schedules[seed]
    ]
    spec = soak.job.spec
    hit = replace(soak.job, spec=replace(spec, drill=replace(spec.drill, faults=faults)))
    folder = soak.runs / f"soak-{seeds[0]}-{int(time.time())}"
    run = create_run(hit, soak.plan, folder=folder, runs=soak.runs, data=soak.data)
    ran = run_to_end(run, on_look=_Looks(run, len(seeds), on_note), limit_s=soak.limit_s)
    for place, seed in enumerate(seeds):
        line = soak.judge(ran, calm, seed=seed, faults=schedules[seed], place=place)
        yield line
        if not line.passed:
            return


class _Looks:
    """Notes now and then how far a batch is."""

    def __init__(self, run: RunFolder, num: int, on_note: Callable[[str], None]) -> None:
        self._run, self._num, self._note = run, num, on_note
        self._looked = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._looked < _LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        lines = read_metrics(self._run.metrics_file)
        if lines:
            place = min(self._num - 1, lines[-1].step // STRETCH)
            self._note(f"  step {lines[-1].step}: schedule {place + 1} of {self._num}")
