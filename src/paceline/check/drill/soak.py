"""The schedules of a soak, and the verdict on each one's stretch of a run: the state's SHA-256
equal to the undisturbed run's after the same step, and every sample consumed exactly once.

Leaves out the run itself (`launch/soak.py`).
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.check.drill.ledger import audit, order_in, pure_digest
from paceline.check.drill.schedule import random_schedule
from paceline.job import Job
from paceline.job.fault_grammar import shifted
from paceline.launch.drill import Ran
from paceline.launch.soak import STRETCH
from paceline.plan import Plan
from paceline.prepare import TrainedOn
from paceline.record import events as log
from paceline.record.soak import SoakLine

MOST_FAULTS = 5


def draw(seed: int, num_ranks: int, kinds: Sequence[str]) -> tuple[str, ...]:
    """The schedule of a seed."""
    return random_schedule(
        seed,
        num_faults=random.Random(seed ^ 0x5EED).randint(1, MOST_FAULTS),
        num_ranks=num_ranks,
        first_step=2,
        last_step=STRETCH - 2,
        kinds=kinds,
    )


@dataclass(frozen=True, slots=True)
class StretchJudge:
    """Judges one schedule's stretch of a run (`launch.soak.Judge`)."""

    job: Job
    plan: Plan
    data: TrainedOn | None

    def __call__(
        self, ran: Ran, calm: Ran, *, seed: int, faults: Sequence[str], place: int
    ) -> SoakLine:
        first, last = place * STRETCH + 1, (place + 1) * STRETCH
        complaints = [*self._of_state(ran, calm, last), *self._of_samples(ran, first, last)]
        if last == self.job.spec.train.steps:
            complaints += [f"left behind: {what}" for what in ran.left_behind]
        recoveries = [
            event
            for event in ran.events
            if isinstance(event, log.Recovered) and first <= event.failed_after_step + 1 <= last
        ]
        digest = ran.digests.get(last) or ran.digest or ""
        return SoakLine(
            seed=seed,
            passed=not complaints,
            faults=tuple(faults),
            happened=_num_happened(ran, faults, place),
            recoveries=len(recoveries),
            longest_s=max((event.downtime_s for event in recoveries), default=None),
            steps_lost=sum(event.steps_lost for event in recoveries),
            says="; ".join(complaints) or f"sha256 {digest[:12]} equal",
            run=str(ran.run.path),
        )

    def _of_state(self, ran: Ran, calm: Ran, last: int) -> list[str]:
        digests = ran.digests
        if last == self.job.spec.train.steps and last not in digests:
            if ran.digest == calm.digest:
                return []
            return ["the state at the end differs from the undisturbed run's"]
        checked = next((step for step in sorted(digests) if step >= last), None)
        if checked is None:
            return [f"the run did not reach step {last}"]
        if digests[checked] != calm.digests.get(checked):
            return [f"the state after step {checked} differs from the undisturbed run's"]
        return []

    def _of_samples(self, ran: Ran, first: int, last: int) -> list[str]:
        started = [event for event in ran.events if isinstance(event, log.TrainingStarted)]
        lines = [line for line in ran.lines if first <= line.step <= last]
        return audit(
            [replace(line, step=line.step - first + 1) for line in lines],
            num_steps=STRETCH,
            first_steps={event.generation: event.first_step - first + 1 for event in started},
            digest_of=self._digest_of(first),
        )

    def _digest_of(self, first: int) -> Callable[[int], str | None]:
        """Step of the stretch, from 1 -> the hash of the sample ids that it must have."""
        if self.data is None:
            return lambda step: None
        spec = self.job.spec
        order = order_in(self.data, spec.data.seq_len)
        digest_of = pure_digest(spec.train.seed, self.plan.layout.global_batch, order)
        return lambda step: digest_of(step + first - 1)


def _num_happened(ran: Ran, faults: Sequence[str], place: int) -> int:
    wanted = Counter(shifted(text, place * STRETCH) for text in faults)
    seen = Counter(event.fault for event in ran.events if isinstance(event, log.FaultInjected))
    return sum((wanted & seen).values())


def summarise(lines: Sequence[SoakLine]) -> dict[str, Any]:
    """What all schedules came to: counts, and those that failed."""
    failed = [line for line in lines if not line.passed]
    longest = [line.longest_s for line in lines if line.longest_s is not None]
    return {
        "schedules": len(lines),
        "passed": len(lines) - len(failed),
        "faults": sum(line.happened for line in lines),
        "recoveries": sum(line.recoveries for line in lines),
        "steps_lost": sum(line.steps_lost for line in lines),
        "longest_downtime_s": max(longest, default=None),
        "failed": [{"seed": line.seed, "says": line.says, "run": line.run} for line in failed],
    }
