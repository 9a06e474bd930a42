"""Made-up records of drills."""

from paceline.check.drill.oracle import Drilled
from paceline.record import events as log
from paceline.record.metrics import StepMetrics

WANTED = {step: f"samples-{step}" for step in range(1, 21)}


def line(step: int, generation: int = 1, samples: str | None = None) -> StepMetrics:
    return StepMetrics(
        step=step,
        generation=generation,
        at=float(step),
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens_per_s=1.0,
        step_s=1.0,
        forward_s=0.4,
        backward_s=0.4,
        vote_s=0.1,
        apply_s=0.1,
        memory_bytes=1,
        applied=True,
        samples_digest=samples or WANTED[step],
    )


def injected(fault: str, rank: int = 1) -> log.FaultInjected:
    return log.FaultInjected(at=6.0, generation=1, fault=fault, rank=rank, pid=9)


def lost(how: str, rank: int = 1, node: int = 0) -> log.WorkerLost:
    return log.WorkerLost(
        at=6.1, generation=1, rank=rank, node=node, pid=9, how=how, detail=None, last_step=5
    )


def recovered(steps_lost: int = 0, downtime_s: float = 0.5) -> log.Recovered:
    return log.Recovered(
        at=7.0,
        generation=2,
        lost_rank=1,
        failed_after_step=5,
        resumed_from_step=5 - steps_lost,
        steps_lost=steps_lost,
        source="replica",
        in_place=True,
        detect_s=0.1,
        fence_s=0.1,
        start_s=0.1,
        restore_s=0.1,
        first_step_s=0.1,
        downtime_s=downtime_s,
    )


def started(first_step: int, generation: int) -> log.TrainingStarted:
    return log.TrainingStarted(
        at=1.0,
        generation=generation,
        first_step=first_step,
        checkpoint=None,
        pids=[],
        backend="gloo",
        world_size=2,
    )


def finished(digest: str | None = "same", outcome: str = "finished", reason: str | None = None):
    return log.RunFinished(
        at=20.0,
        generation=2,
        outcome=outcome,
        step=20,
        state_digest=digest,
        held_out_loss=None,
        restarts=1,
        reason=reason,
        baseline_bytes=[],
        peak_bytes=[],
    )


def drilled(*events: log.AnyEvent, faults=("kill rank=1 step=6",), lines=None, left=()) -> Drilled:
    """A run of 20 steps on two replicas; events between its start and its end are given."""
    whole = [started(1, 1), *events, started(6, 2)]
    if not any(isinstance(event, log.RunFinished) for event in events):
        whole.append(finished())
    usual = [*(line(step) for step in range(1, 6)), *(line(step, 2) for step in range(6, 21))]
    return Drilled(
        faults=tuple(faults),
        events=whole,
        lines=usual if lines is None else lines,
        num_steps=20,
        ranks_per_node=2,
        replicas=((0, 1),),
        max_restarts=3,
        left_behind=left,
        digest_of_samples=WANTED,
    )
