"""A soak: random schedules of faults, many in one long run, each with its own verdict.

Schedule after schedule hits the same processes, which live on between them. Every schedule has a
stretch of steps; at its end the SHA-256 of the whole state is compared with that of the undisturbed
run after the same step, and the ledger of its steps is audited. What was verified goes into
`soak.jsonl`, a line a schedule, so that the same command goes on where it stopped.
"""

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from paceline.launch.drill import Ran
    from paceline.plan import Plan
    from paceline.prepare import TrainedOn
    from paceline.record.run import RunFolder
    from paceline.spec import Job

STRETCH = 12
"""Steps of a schedule. A guess: room for five faults and a quiet step at the end."""

BATCH = 20
"""Schedules in one run: what is lost when one of them ends it, and what the undisturbed run has to
be as long as. A guess: with fewer, starting a run costs more than its steps."""

_MOST_FAULTS = 5
_RESTARTS = 20
"""`recovery.max_restarts` of a soak: several faults may hit one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One schedule's line in `soak.jsonl`."""

    seed: int
    passed: bool
    faults: tuple[str, ...]
    """With steps from 1, as in a run of their own."""

    happened: int
    """Faults that did; one that waits for a recovery may find none."""

    recoveries: int
    longest_s: float | None
    """The longest downtime."""

    steps_lost: int
    says: str
    run: str


def soak(
    job: "Job",
    *,
    num: int,
    seed: int,
    kinds: Sequence[str],
    runs: Path,
    limit_s: float,
    as_json: bool,
) -> int:
    """Run what is not done yet of `num` schedules; the command's exit code."""
    from paceline.cli.drill import plan_of
    from paceline.cli.preparing import show_preparing
    from paceline.launch.drill import run_reference
    from paceline.prepare import find_data

    size = min(BATCH, num)
    job = _soak_job(job, size)
    plan, data = plan_of(job), find_data(job, show_preparing())
    runs.mkdir(parents=True, exist_ok=True)
    ledger = runs / "soak.jsonl"
    done = _done(ledger)
    _say(f"{num} schedules of 1 to {_MOST_FAULTS} faults on {plan.layout.name}, seeds from {seed}")
    calm = run_reference(job, plan, runs, data, on_event=lambda event: None, limit_s=limit_s)
    _say(f"undisturbed  {calm.run.path}, sha256 {(calm.digest or '')[:16]}")
    lines = [line for number, line in sorted(done.items()) if seed <= number < seed + num]
    if lines:
        _say(f"{len(lines)} were done before: {ledger}")
    left = num - len(lines)
    ahead = (n for n in range(seed, seed + num) if n not in done)
    again: list[int] = []
    began, fresh = time.monotonic(), 0
    while left:
        batch = again + list(islice(ahead, size - len(again)))
        found = _run_batch(job, plan, data, calm, batch, kinds, runs, limit_s)
        for line in found:
            with ledger.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
            fresh, left = fresh + 1, left - 1
            left_s = left * (time.monotonic() - began) / fresh
            mark = "ok" if line.passed else "FAILED"
            _say(
                f"{mark} seed {line.seed}: {line.happened} faults, {line.recoveries} recoveries, "
                f"{line.steps_lost} steps lost; {line.says}; {left_s:.0f} s left"
            )
        lines += found
        verified = {line.seed for line in found}
        again = [n for n in batch if n not in verified]
    failed = [line for line in lines if not line.passed]
    summary = _summary(lines)
    click.echo(json.dumps(summary, indent=2) if as_json else _text(summary, ledger))
    return 1 if failed else 0


def _soak_job(job: "Job", size: int) -> "Job":
    """The job with as many steps as a batch takes, and digests between the schedules."""
    spec = job.spec
    train = replace(spec.train, steps=STRETCH * size)
    drill = replace(spec.drill, kill=[], faults=[], digest_every=STRETCH)
    recovery = replace(spec.recovery, max_restarts=_RESTARTS)
    return replace(job, spec=replace(spec, train=train, drill=drill, recovery=recovery))


def _run_batch(
    job: "Job",
    plan: "Plan",
    data: "TrainedOn | None",
    calm: "Ran",
    seeds: Sequence[int],
    kinds: Sequence[str],
    runs: Path,
    limit_s: float,
) -> list[Line]:
    """What came of the schedules of one run, up to the first that failed: those after it have not
    been judged, and come again."""
    from paceline.launch.drill import run_to_end
    from paceline.record.run import create_run
    from paceline.spec.faults import shifted

    num_ranks = plan.layout.num_ranks
    schedules = {seed: draw(seed, num_ranks, kinds) for seed in seeds}
    faults = [
        shifted(text, STRETCH * place)
        for place, seed in enumerate(seeds)
        for text in schedules[seed]
    ]
    hit = replace(job, spec=replace(job.spec, drill=replace(job.spec.drill, faults=faults)))
    folder = runs / f"soak-{seeds[0]}-{int(time.time())}"
    run = create_run(hit, plan, folder=folder, runs=runs, data=data)
    progress = _Progress(run, seeds)
    ran = run_to_end(run, on_look=progress.look, limit_s=limit_s)
    progress.end()
    found = []
    for place, seed in enumerate(seeds):
        line = _judge(hit, plan, data, ran, calm, seed, schedules[seed], place)
        found.append(line)
        if not line.passed:
            break
    return found


def draw(seed: int, num_ranks: int, kinds: Sequence[str]) -> tuple[str, ...]:
    """The schedule of a seed."""
    from paceline.check.drill.schedule import random_schedule

    num = random.Random(seed ^ 0x5EED).randint(1, _MOST_FAULTS)
    return random_schedule(
        seed,
        num_faults=num,
        num_ranks=num_ranks,
        first_step=2,
        last_step=STRETCH - 2,
        kinds=kinds,
    )


def _judge(
    job: "Job",
    plan: "Plan",
    data: "TrainedOn | None",
    ran: "Ran",
    calm: "Ran",
    seed: int,
    faults: tuple[str, ...],
    place: int,
) -> Line:
    """One schedule's stretch of the run."""
    from paceline.check.drill.ledger import audit, order_in, pure_digest
    from paceline.record import events as log

    first, last = place * STRETCH + 1, (place + 1) * STRETCH
    lines = [line for line in ran.lines if first <= line.step <= last]
    complaints: list[str] = []
    digests = ran.digests
    checked = next((step for step in sorted(digests) if step >= last), None)
    if last == job.spec.train.steps and last not in digests:
        checked = None
        if ran.digest != calm.digest:
            complaints.append("the state at the end differs from the undisturbed run's")
    elif checked is None:
        complaints.append(f"the run did not reach step {last}")
    elif digests[checked] != calm.digests.get(checked):
        complaints.append(f"the state after step {checked} differs from the undisturbed run's")
    digest_of = None
    if data is not None:
        order = order_in(data, job.spec.data.seq_len)
        digest_of = pure_digest(job.spec.train.seed, plan.layout.global_batch, order)
    started = [event for event in ran.events if isinstance(event, log.TrainingStarted)]
    shown = [replace(line, step=line.step - first + 1) for line in lines]
    complaints += audit(
        shown,
        num_steps=STRETCH,
        first_steps={event.generation: event.first_step - first + 1 for event in started},
        digest_of=(lambda step: digest_of(step + first - 1)) if digest_of else lambda step: None,
    )
    back = [
        event
        for event in ran.events
        if isinstance(event, log.Recovered) and first <= event.failed_after_step + 1 <= last
    ]
    is_last_judged = bool(ran.left_behind) and last == job.spec.train.steps
    if is_last_judged:
        complaints += [f"left behind: {each}" for each in ran.left_behind]
    return Line(
        seed=seed,
        passed=not complaints,
        faults=faults,
        happened=_happened(ran, faults, place),
        recoveries=len(back),
        longest_s=max((event.downtime_s for event in back), default=None),
        steps_lost=sum(event.steps_lost for event in back),
        says="; ".join(complaints)
        or f"sha256 {(digests.get(last) or ran.digest or '')[:12]} equal",
        run=str(ran.run.path),
    )


def _happened(ran: "Ran", faults: Sequence[str], place: int) -> int:
    from collections import Counter

    from paceline.record import events as log
    from paceline.spec.faults import shifted

    wanted = Counter(shifted(text, place * STRETCH) for text in faults)
    seen = Counter(e.fault for e in ran.events if isinstance(e, log.FaultInjected))
    return sum((wanted & seen).values())


class _Progress:
    """A live count of the steps of a batch."""

    def __init__(self, run: "RunFolder", seeds: Sequence[int]) -> None:
        self._run, self._seeds = run, seeds
        self._shown = time.monotonic()

    def look(self) -> None:
        from paceline.record.metrics import read_metrics

        if time.monotonic() - self._shown < 10.0:
            return
        self._shown = time.monotonic()
        lines = read_metrics(self._run.metrics_file)
        if lines:
            place = min(len(self._seeds) - 1, lines[-1].step // STRETCH)
            _say(f"  step {lines[-1].step}: schedule {place + 1} of {len(self._seeds)}")

    def end(self) -> None:
        self.look()


def _done(ledger: Path) -> dict[int, Line]:
    """What an earlier soak has verified; failed ones are tried again."""
    if not ledger.exists():
        return {}
    lines = [Line(**json.loads(text)) for text in ledger.read_text().splitlines() if text.strip()]
    return {line.seed: line for line in lines if line.passed}


def _summary(lines: Sequence[Line]) -> dict[str, Any]:
    failed = [line for line in lines if not line.passed]
    longest = sorted(line.longest_s for line in lines if line.longest_s is not None)
    return {
        "schedules": len(lines),
        "passed": len(lines) - len(failed),
        "faults": sum(line.happened for line in lines),
        "recoveries": sum(line.recoveries for line in lines),
        "steps_lost": sum(line.steps_lost for line in lines),
        "longest_downtime_s": longest[-1] if longest else None,
        "failed": [{"seed": line.seed, "says": line.says, "run": line.run} for line in failed],
    }


def _text(summary: Mapping[str, Any], ledger: Path) -> str:
    longest = summary["longest_downtime_s"]
    lines = [
        "",
        f"{summary['passed']} of {summary['schedules']} schedules passed: "
        f"{summary['faults']} faults, {summary['recoveries']} recoveries, "
        f"{summary['steps_lost']} steps done again"
        + (f", longest downtime {longest:.2f} s" if longest is not None else ""),
    ]
    lines += [f"FAILED seed {f['seed']}: {f['says']}; {f['run']}" for f in summary["failed"]]
    return "\n".join([*lines, f"every schedule: {ledger}"])


def _say(line: str) -> None:
    click.echo(line, err=True)
