"""Did the run come through? What a drill's run did, held against an undisturbed one.

Only arithmetic on the record. Every check says what it compared; one that could not be made says
why, and does not count as passed.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from paceline.check.drill.ledger import audit
from paceline.job.fault_grammar import Fault, parse_fault
from paceline.record import events as log
from paceline.record.metrics import StepMetrics

_ROUNDING_S = 1e-3
"""By how much the phases of a recovery may miss its downtime: they are differences of the same
clock readings, so only rounding is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold."""

    name: str
    ok: bool | None
    """None when it could not be checked."""

    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fault, and what came of it."""

    fault: str
    happened: bool
    verdict: str | None
    """What the run's record says of it; None when it says nothing."""

    is_right: bool | None
    """Whether that is the right name, rank and node; None when there is nothing to name."""

    recovered: log.Recovered | None
    """The recovery that ended it; several faults may share one."""

    needs: str
    """What was expected: `recovers`, `unharmed`, `refuses`, `stops`, `relaunches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The undisturbed run."""

    digest: str | None
    digests: Mapping[int, str] = field(default_factory=dict)
    """By step, where they were asked for."""

    losses: Mapping[int, float | None] = field(default_factory=dict)
    """By step: what a run is compared by whose record promises equality to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a drill found."""

    outcomes: tuple[Outcome, ...]
    checks: tuple[Check, ...]
    steps_lost: int

    @property
    def is_right(self) -> bool:
        """Whether everything that could be checked held."""
        return all(check.ok is not False for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drilled:
    """Everything there is to know of a run with faults."""

    faults: tuple[str, ...]
    events: Sequence[log.AnyEvent]
    lines: Sequence[StepMetrics]
    num_steps: int
    ranks_per_node: int
    replicas: Sequence[Sequence[int]]
    """Groups of ranks that hold the same; see `parallel.replicas_of`."""

    max_restarts: int
    left_behind: Sequence[str]
    digest_of_samples: Mapping[int, str] | None
    """Step -> the hash of the sample ids it must have; None for your own program."""


def judge(run: Drilled, reference: Reference) -> Verdict:
    """Every check of a drill."""
    outcomes = tuple(_outcomes(run))
    ends_early = any(_stops(run, each) for each in outcomes)
    lost, unjustified = _steps_lost(run)
    checks = (
        _happened(run, outcomes, ends_early=ends_early),
        _ended(run, outcomes, ends_early=ends_early),
        _state(run, outcomes, reference, ends_early=ends_early),
        _ledger(run, ends_early=ends_early),
        Check(
            name="steps lost",
            ok=not unjustified,
            says="; ".join(unjustified)
            if unjustified
            else f"{lost} finished steps repeated"
            + (": no rank that had the state was left" if lost else ""),
        ),
        _verdicts(outcomes),
        _unexplained(run),
        _times(run),
        _left_behind(run, ends_early=ends_early),
    )
    return Verdict(outcomes=outcomes, checks=checks, steps_lost=lost)


def _stops(run: Drilled, outcome: Outcome) -> bool:
    """Whether the run should have ended because of it."""
    repeats = Counter(run.faults)[outcome.fault]
    return outcome.happened and (outcome.needs == "stops" or repeats > run.max_restarts)


def _outcomes(run: Drilled) -> Iterator[Outcome]:
    happened: list[tuple[Fault, log.FaultInjected, int]] = []
    asked = Counter(run.faults)
    for index, event in enumerate(run.events):
        if isinstance(event, log.FaultInjected):
            happened.append((parse_fault(event.fault), event, index))
            asked[event.fault] -= 1
    taken: set[int] = set()
    for fault, event, index in happened:
        needs = fault.row.end
        how, right = _named(run, fault, event, index, taken)
        after = (e for e in run.events[index:] if isinstance(e, log.Recovered))
        recovered = next(after, None) if needs == "recovers" else None
        yield Outcome(
            fault=event.fault,
            happened=True,
            verdict=how,
            is_right=right,
            recovered=recovered,
            needs=needs,
        )
    for text, count in asked.items():
        for _ in range(count):
            yield Outcome(
                fault=text,
                happened=False,
                verdict=None,
                is_right=None,
                recovered=None,
                needs=parse_fault(text).row.end,
            )


def _named(
    run: Drilled, fault: Fault, injected: log.FaultInjected, index: int, taken: set[int]
) -> tuple[str | None, bool | None]:
    """What the record calls a fault, and whether that is what it was."""
    rest = list(enumerate(run.events))[index:]
    if fault.row.end == "unharmed":
        return _unharmed(fault, injected, [event for _, event in rest])
    if fault.row.end == "refuses":
        refused = [e for _, e in rest if isinstance(e, log.StepRefused) and e.step == fault.step]
        right = bool(refused) and str(injected.rank) in refused[0].reason
        return (refused[0].reason if refused else None), right
    if fault.row.end == "stops":
        reasons = [e.reason for _, e in rest if isinstance(e, log.RunFinished)]
        told = reasons[-1] if reasons else None
        return told, told is not None and str(fault.sample) in told
    if fault.row.end == "relaunches":
        took_over = any(isinstance(e, log.ControllerReplaced) for _, e in rest)
        if took_over:
            return "another controller took over", True
        again = any(isinstance(e, log.RunStarted) for _, e in rest)
        return ("started again" if again else None), again
    # Its end may be told of after the recovery from the fault before is.
    for number, event in rest:
        if not isinstance(event, log.WorkerLost) or number in taken:
            continue
        if (event.pid, event.rank) == (injected.pid, injected.rank):
            taken.add(number)
            return event.how, re.search(fault.row.verdict or "", event.how) is not None
    node = injected.rank // run.ranks_per_node
    for number, event in rest:
        if isinstance(event, log.WorkerLost) and number not in taken:
            of_node = fault.row.is_whole_node and event.node == node
            if event.rank == injected.rank or of_node:
                taken.add(number)
                pattern = fault.row.verdict or ""
                return event.how, re.search(pattern, event.how) is not None
        if isinstance(event, log.Recovered):
            break
    # In a recovery the loss may be told before the word of the fault: a worker without a rank yet.
    return None, None if fault.in_recovery else False


def _unharmed(
    fault: Fault, injected: log.FaultInjected, rest: Sequence[log.AnyEvent]
) -> tuple[str | None, bool | None]:
    if fault.kind == "flip":
        found = [event for event in rest if isinstance(event, log.CorruptionFound)]
        if not found:
            return None, False
        named = {rank for event in found for rank in event.ranks}
        suspects = next((event.suspects for event in found if event.suspects), [])
        if not named and injected.rank in suspects:  # found and repaired; of two nobody can say
            of = " and ".join(map(str, suspects))
            healed = f"healed from {found[0].healed}"
            fix = "recovery.fingerprint_every=1 compares before others take over its numbers"
            return f"undecided between ranks {of}, {healed}; {fix}", None
        return f"{found[-1].verdict}, healed from {found[-1].healed}", injected.rank in named
    following = rest[1:]
    ends = (i for i, e in enumerate(following) if isinstance(e, log.FaultInjected))
    mine = following[: next(ends, len(following))]
    blamed = [e for e in mine if isinstance(e, log.WorkerLost | log.WorkerStuck)]
    if not blamed:
        return "nobody was blamed", True
    return f"rank {blamed[0].rank} was blamed", False


def _happened(run: Drilled, outcomes: Sequence[Outcome], *, ends_early: bool) -> Check:
    missed = [outcome.fault for outcome in outcomes if not outcome.happened]
    num = len(outcomes) - len(missed)
    return Check(
        name="faults",
        ok=not missed or (ends_early and num > 0),
        says=f"{num} of {len(outcomes)} happened" + (f"; not: {', '.join(missed)}" * bool(missed)),
    )


def _ended(run: Drilled, outcomes: Sequence[Outcome], *, ends_early: bool) -> Check:
    ends = [event for event in run.events if isinstance(event, log.RunFinished)]
    last = ends[-1] if ends else None
    if last is None:
        return Check(name="end", ok=False, says="the run left no word of its end")
    says = f"{last.outcome} at step {last.step}" + (f": {last.reason}" if last.reason else "")
    return Check(name="end", ok=last.outcome == ("failed" if ends_early else "finished"), says=says)


def _state(
    run: Drilled, outcomes: Sequence[Outcome], reference: Reference, *, ends_early: bool
) -> Check:
    name = "state"
    if ends_early:
        return Check(name=name, ok=None, says="not compared: the run was to stop")
    if any(outcome.needs == "refuses" and outcome.happened for outcome in outcomes):
        says = "not compared: a step was to be refused, which the undisturbed run did"
        return Check(name=name, ok=None, says=says)
    changed = [event for event in run.events if isinstance(event, log.ExactnessChanged)]
    if changed:
        return _state_to_rounding(run, changed, reference)
    ends = [event for event in run.events if isinstance(event, log.RunFinished)]
    mine = ends[-1].state_digest if ends else None
    if mine is None or reference.digest is None:
        return Check(name=name, ok=False, says="no digest of the state at the end")
    same = mine == reference.digest
    steps = {line.step: line.state_digest for line in run.lines if line.state_digest is not None}
    differ = [step for step in sorted(steps) if reference.digests.get(step) != steps[step]]
    if same and not (reference.digests and differ):
        also = f", and after {len(steps)} steps between" if reference.digests else ""
        says = f"SHA-256 equal to the undisturbed run: {mine[:16]}{also}"
        return Check(name=name, ok=True, says=says)
    where = f"; first seen after step {differ[0]}" if differ and reference.digests else ""
    says = f"SHA-256 {mine[:16]}, undisturbed {reference.digest[:16]}{where}"
    return Check(name=name, ok=False, says=says)


def _state_to_rounding(
    run: Drilled, changed: Sequence[log.ExactnessChanged], reference: Reference
) -> Check:
    """The losses, where the run's record promises less than the same bits.

    The bound is the event's, of the first step in another order, once for each such step: every
    step adds a rounding of its own. That they add up is an assumption, not a proof.
    """
    last = changed[-1]
    if last.exactness != "numeric" or last.tolerance is None:
        says = f"not compared: the run's record promises `{last.exactness}`: {last.reason}"
        return Check(name="state", ok=None, says=says)
    mine = {line.step: (line.generation, line.loss) for line in run.lines}
    first = changed[0].generation
    later = sorted(step for step, (generation, _) in mine.items() if generation >= first)
    allowed = dict.fromkeys(mine, 0.0) | {
        step: number * last.tolerance for number, step in enumerate(later, start=1)
    }
    apart = {step: _apart(loss, reference.losses.get(step)) for step, (_, loss) in mine.items()}
    wrong = [step for step in sorted(mine) if apart[step] > allowed[step]]
    how = f"numeric: {last.reason}"
    if wrong or not later:
        where = f"differs by {apart[wrong[0]]:.2g} after step {wrong[0]}" if wrong else "is missing"
        return Check(name="state", ok=False, says=f"the loss {where}, not by rounding ({how})")
    most = max(apart.values())
    says = f"equal to rounding, not to the bit ({how}): the loss of all {len(mine)} steps differs"
    return Check(name="state", ok=True, says=f"{says} by at most {most:.2g} of it")


def _apart(loss: float | None, undisturbed: float | None) -> float:
    """Relative difference; two losses that are not finite are no equal ones."""
    if loss is None or undisturbed is None:
        return inf
    return 0.0 if loss == undisturbed else abs(loss - undisturbed) / (abs(undisturbed) or 1.0)


def _ledger(run: Drilled, *, ends_early: bool) -> Check:
    started = [event for event in run.events if isinstance(event, log.TrainingStarted)]
    known = run.digest_of_samples
    last = max((line.step for line in run.lines), default=0)
    wrong = audit(
        run.lines,
        num_steps=last if ends_early else run.num_steps,
        first_steps={event.generation: event.first_step for event in started},
        digest_of=(lambda step: None) if known is None else known.get,
        gone_back=[
            (event.generation, event.goes_on_after)
            for event in run.events
            if isinstance(event, log.CorruptionFound)
        ],
    )
    says = f"{last} steps, each sample used once"
    if known is None:
        says += " (your program chooses the samples; they were not checked)"
    return Check(name="ledger", ok=not wrong, says="; ".join(wrong) or says)


def _steps_lost(run: Drilled) -> tuple[int, list[str]]:
    """Finished steps that were repeated, and the recoveries in which that need not have been."""
    lost, complaints = 0, []
    at_work: list[int] = []
    started: list[int] = []
    told: set[int] = set()
    for event in run.events:
        if isinstance(event, log.WorkerLost):
            told.add(event.rank)
        if isinstance(event, log.TrainingStarted):
            started = event.pids
            at_work = at_work or started
        if isinstance(event, log.Recovered):
            lost += event.steps_lost
            new = {rank for rank, pid in enumerate(started) if pid not in at_work} or told
            if event.steps_lost and not any(set(group) <= new for group in run.replicas):
                complaints.append(
                    f"{event.steps_lost} steps were repeated after step "
                    f"{event.resumed_from_step}, though of every rank a replica was left"
                )
            if event.steps_lost:
                complaints += _wrongly_fenced(run, event)
            at_work, told = started, set()
    return lost, complaints


def _wrongly_fenced(run: Drilled, recovered: log.Recovered) -> list[str]:
    """Ranks that were ended, and their state with them, though no fault was theirs."""
    hit = {e.rank for e in run.events if isinstance(e, log.FaultInjected)}
    return [
        f"rank {event.rank} {event.how}, though no fault was injected there"
        for event in run.events
        if isinstance(event, log.WorkerLost)
        and event.at <= recovered.at
        and event.rank not in hit
        and event.how.startswith("did not")
    ]


def _unexplained(run: Drilled) -> Check:
    """Exceptions of processes that no fault was done to: recovering must not break anything."""
    hit = {event.pid for event in run.events if isinstance(event, log.FaultInjected)}
    broken = [
        f"rank {event.rank} (pid {event.pid}): {event.how}"
        for event in run.events
        if isinstance(event, log.WorkerLost)
        and event.pid not in hit
        and event.cause in ("exception", "data or software", "program")
    ]
    says = "; ".join(broken) or "no process failed without an injected fault"
    return Check(name="unexplained", ok=not broken, says=says)


def _verdicts(outcomes: Sequence[Outcome]) -> Check:
    wrong = [
        f"{outcome.fault}: {outcome.verdict or 'not named'}"
        for outcome in outcomes
        if outcome.happened and outcome.is_right is False
    ]
    right = sum(outcome.is_right is True for outcome in outcomes)
    return Check(
        name="verdicts",
        ok=not wrong,
        says="; ".join(wrong) or f"{right} recognised as the fault that was injected",
    )


def _times(run: Drilled) -> Check:
    back = [event for event in run.events if isinstance(event, log.Recovered)]
    off = [event for event in back if abs(_sum_of_phases(event) - event.downtime_s) > _ROUNDING_S]
    says = f"of {len(back)} recoveries the phases add up to the downtime"
    if off:
        says = f"the phases add up to {_sum_of_phases(off[0]):.3f} s of {off[0].downtime_s:.3f} s"
    return Check(name="times", ok=not off, says=says)


def _left_behind(run: Drilled, *, ends_early: bool) -> Check:
    """Half a checkpoint of a run that had to end is for the next save after it to take away."""
    left = [each for each in run.left_behind if not (ends_early and each.endswith(".tmp"))]
    says = ", ".join(left) or "no process, shared memory, lock or partial checkpoint"
    return Check(name="left behind", ok=not left, says=says)


def _sum_of_phases(event: log.Recovered) -> float:
    parts = (event.fence_s, event.start_s, event.restore_s, event.first_step_s)
    return (event.detect_s or 0.0) + sum(parts)
