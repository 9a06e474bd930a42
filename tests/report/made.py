"""Records of runs that never ran, made in memory: the clock starts at `T0`, a step takes 0.1 s."""

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.estimate import Estimate, MemoryEstimate
from paceline.job import DataSpec, JobSpec, ModelSpec, TrainSpec
from paceline.parallel import Layout
from paceline.plan import Decision, Plan, Rejected
from paceline.plan.decision import Point
from paceline.profile import Block, ModelProfile
from paceline.record import events as log
from paceline.record.gather import RunRecord
from paceline.record.metrics import StepMetrics
from paceline.topology import Cluster

T0 = 1_795_258_620.0
MIB = 2**20


def line(step: int, at: float, *, generation: int = 1, loss: float | None = None) -> StepMetrics:
    """One step of 0.1 s that ended at `at` seconds after `T0`."""
    return StepMetrics(
        step=step,
        generation=generation,
        at=T0 + at,
        loss=1.6 + 4 * math.exp(-step / 60) + 0.12 * math.sin(step * 1.7) if loss is None else loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens_per_s=20_000.0 + 900 * math.sin(step * 2.3),
        step_s=0.1,
        forward_s=0.035,
        backward_s=0.055,
        vote_s=0.006,
        apply_s=0.004,
        memory_bytes=400 * MIB,
        applied=loss is None or math.isfinite(loss),
        samples_digest="0",
    )


def started(at: float = 0.0, *, resumed: bool = False) -> log.RunStarted:
    return log.RunStarted(
        at=T0 + at,
        generation=0,
        num_ranks=2,
        num_nodes=1,
        num_steps=200,
        resumed=resumed,
        layout="DDP over 2 ranks",
        versions={"paceline": "0.1.0", "python": "3.11.7"},
    )


def training(at: float, first_step: int, *, generation: int = 1) -> log.TrainingStarted:
    return log.TrainingStarted(
        at=T0 + at,
        generation=generation,
        first_step=first_step,
        checkpoint=None if first_step == 1 else f"step-{first_step - 1:08d}",
        pids=[],
        backend="gloo",
        world_size=2,
    )


def saved(at: float, step: int, *, generation: int = 1) -> log.CheckpointSaved:
    return log.CheckpointSaved(
        at=T0 + at,
        generation=generation,
        step=step,
        checkpoint=f"step-{step:08d}",
        num_bytes=8_244_110,
        stall_s=0.05,
        write_s=0.05,
    )


def evaluated(at: float, step: int, loss: float, *, generation: int = 1) -> log.Evaluated:
    return log.Evaluated(at=T0 + at, generation=generation, step=step, loss=loss, seconds=0.3)


def lost(at: float, last_step: int, *, generation: int = 1, rank: int = 1) -> log.WorkerLost:
    return log.WorkerLost(
        at=T0 + at,
        generation=generation,
        rank=rank,
        node=0,
        pid=99,
        how="killed by SIGKILL",
        detail=None,
        last_step=last_step,
    )


def recovered(at: float, after: int, resumed_from: int, *, generation: int = 2) -> log.Recovered:
    """A recovery of 4.3 s that ended at `at`."""
    return log.Recovered(
        at=T0 + at,
        generation=generation,
        lost_rank=1,
        failed_after_step=after,
        resumed_from_step=resumed_from,
        steps_lost=after - resumed_from,
        source="checkpoint",
        in_place=False,
        detect_s=0.03,
        fence_s=0.07,
        start_s=2.9,
        restore_s=1.0,
        first_step_s=0.3,
        downtime_s=4.3,
    )


def finished(at: float, *, outcome: str = "finished", step: int = 200) -> log.RunFinished:
    is_whole = outcome == "finished"
    return log.RunFinished(
        at=T0 + at,
        generation=1,
        outcome=outcome,
        step=step,
        state_digest="ab" * 32 if is_whole else None,
        held_out_loss=1.62 if is_whole else None,
        restarts=1,
        reason=None if is_whole else "rank 1: killed by SIGKILL",
        baseline_bytes=[260 * MIB, 262 * MIB] if is_whole else [],
        peak_bytes=[402 * MIB, 398 * MIB] if is_whole else [],
    )


def layout(sharding: str = "none") -> Layout:
    return Layout(data=2, sharding=sharding, micro_batch=8, accumulation=1)  # type: ignore[arg-type]


def memory(activations_bytes: int | None = 90 * MIB) -> MemoryEstimate:
    return MemoryEstimate(
        parts={
            "parameters": 9 * MIB,
            "gradients": 9 * MIB,
            "optimizer": 18 * MIB,
            "activations": activations_bytes,
            "gathered": 4 * MIB,
            "slack": 0,
            "overhead": 280 * MIB,
        }
    )


def plan() -> Plan:
    estimate = Estimate(
        memory=memory(),
        step_s=0.09,
        step_low_s=0.08,
        step_high_s=0.1,
        mfu=0.4,
        hfu=0.4,
        tokens_per_s=22_000.0,
        num_checkpoint_bytes=27 * MIB,
        terms={"compute": 0.09},
    )
    unknown = replace(estimate, memory=memory(None), step_s=None, tokens_per_s=None, mfu=None)
    return Plan(
        cluster=Cluster(
            accelerator="cpu",
            is_local=True,
            num_nodes=1,
            ranks_per_node=2,
            backend="gloo",
            cores_per_rank=1.0,
            memory_bytes=12 * 2**30,
            usable_bytes=11 * 2**30,
            overhead_bytes=280 * MIB,
            peak_flops_per_s={"fp32": 5e10},
            memory_bytes_per_s=None,
            link_bytes_per_s=None,
            network_bytes_per_s=None,
            known={"usable_bytes": "measured"},
        ),
        profile=ModelProfile(
            name="tiny",
            blocks=(Block(name="block", count=3, hidden=0, vector_parameters=200_000),),
            num_embedding_parameters=100_000,
            num_head_parameters=0,
            head_inputs=0,
            head_outputs=0,
            tied=False,
            seq_len=128,
        ),
        decoder=None,
        layout=layout(),
        estimate=estimate,
        precision="fp32",
        checkpoint_every=20,
        evaluate_every=50,
        decisions=(
            Decision(
                field="layout.sharding",
                value="none",
                reason="the whole state is 40 MiB of 11 GiB; sharding would only communicate",
            ),
            Decision(field="checkpoint.every", value="20", reason="a tenth of 200 steps"),
        ),
        rejected=(
            Rejected(layout=layout("full"), estimate=unknown, reason="communicates 1.5x as much"),
        ),
        space_size=2,
        pareto=(
            Point(layout=layout(), step_s=0.09, memory_bytes=410 * MIB, usd=None),
            Point(layout=layout("full"), step_s=0.12, memory_bytes=380 * MIB, usd=None),
        ),
    )


def record(
    events: Sequence[log.AnyEvent] = (),
    metrics: Sequence[StepMetrics] = (),
    *,
    name: str = "tiny-lm",
    with_plan: bool = True,
    is_running: bool = False,
    kept: Sequence[str] = (),
) -> RunRecord:
    spec = JobSpec(
        name="tiny-lm",
        model=ModelSpec(preset="llama-3-8b"),
        train=TrainSpec(global_batch=16, steps=200),
        data=DataSpec(corpus="python-stdlib"),
    )
    return RunRecord(
        name=name,
        folder="/runs/tiny-lm",
        created_at=T0,
        job=spec,
        job_text="name: tiny-lm\ntrain: {global_batch: 16, steps: 200}\n",
        plan=plan() if with_plan else None,
        events=tuple(events),
        metrics=tuple(metrics),
        kept=tuple(kept),
        is_running=is_running,
    )


def killed_and_finished() -> RunRecord:
    """200 steps; rank 1 is killed in step 115, the run goes back to step 100 and on to its end."""
    events: list[log.AnyEvent] = [
        started(),
        log.BaselineEvaluated(at=T0 + 2.9, generation=1, name="bigram model", loss=2.38),
        training(3.0, 1),
        evaluated(3.3, 0, 5.67),
    ]
    lines: list[StepMetrics] = []
    now = 3.31

    def train(first: int, last: int, generation: int) -> None:
        nonlocal now
        for step in range(first, last + 1):
            now += 0.101
            lines.append(line(step, now, generation=generation))
            if step % 50 == 0:
                now += 0.3
                loss = 1.55 + 4 * math.exp(-step / 60)
                events.append(evaluated(now, step, loss, generation=generation))
            if step % 20 == 0:
                now += 0.05
                events.append(saved(now, step, generation=generation))

    train(1, 114, 1)
    killed = now + 0.05
    events += [
        log.FaultInjected(at=T0 + killed, generation=1, fault="rank=1@step=115", rank=1, pid=99),
        lost(killed + 0.03, 114),
        training(killed + 4.0, 101, generation=2),
        recovered(killed + 4.3, 114, 100),
    ]
    now = killed + 4.2
    train(101, 200, 2)
    events.append(finished(now + 0.4))
    events.sort(key=lambda event: event.at)
    kept = [f"step-{step:08d}" for step in (160, 180, 200)]
    return record(events, lines, kept=kept)
