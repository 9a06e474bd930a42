"""Measure how a job scales on this machine: plan it for each number of ranks, run, read times."""

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from paceline.errors import JobError, PacelineError, PlanError, Problem
from paceline.job import Job, LayoutSpec, MetricsSpec, PlanSpec
from paceline.job.evaluate_rules import measures_loss
from paceline.launch.factory import measure_factory
from paceline.launch.ranks import Failing, OnProgress, RankProcess, run_ranks, surroundings
from paceline.launch.ready import check_can_run
from paceline.plan import Plan, plan_job
from paceline.record.bench import Measured, RankTimes, Scaling, Stretch
from paceline.record.lines import read_facts
from paceline.record.run import RunFolder, create_run

_FAILING = Failing(
    code="R041",
    where="paceline bench",
    late="give them longer with --timeout, or fewer --steps or --ranks",
    died="fewer ranks, or a smaller model: a signal without words is often memory",
)

_FIRST_BUCKET = 2**20
"""Bytes of DDP's first bucket where no size is given. Source: torch 2.13,
`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`."""

_FOREVER = 10**9
"""Steps: a bench ends its ranks long before, and saves and evaluates nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One number of ranks, planned."""

    job: Job
    plan: Plan
    notes: tuple[str, ...]
    """What was changed to run the job on so many ranks."""


def read_ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks, fewest first.

    >>> read_ranks("1,4,2")
    (1, 2, 4)

    Raises:
        JobError: `R040`, it is not a list of whole numbers from 1 to 4096.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 9 and 0 < int(part) <= 4096 for part in parts):
        what = f"`{text[:80]}` is not a list of numbers of ranks, each above 0 and at most 4096"
        fix = "write it like --ranks 1,2,4"
        raise JobError.of(code="R040", what=what, where="--ranks", fix=fix)
    return tuple(sorted({int(part) for part in parts}))


def bench_cases(job: Job, counts: Sequence[int], scaling: Scaling) -> list[BenchCase]:
    """The job, planned for each number of ranks on this machine.

    A layout that the job fixes is kept where it can be. Weak scaling takes the job's batch for the
    fewest ranks and makes it larger with them.

    Raises:
        JobError, PlanError: The job cannot be planned or run on one of them; it says on which.
    """
    facts = measure_factory(job)
    cases = []
    for count in counts:
        here, notes = _on_this_machine(job, count)
        if scaling == "weak":
            batch = job.spec.train.global_batch * count // counts[0]
            here = _with_train(here, global_batch=batch)
        try:
            case = _planned(here, count, facts, notes)
        except PacelineError as error:
            raise _on_count(error, count) from None
        problems = list(check_can_run(case.job, case.plan))
        if problems:
            raise _on_count(JobError(*problems), count)
        cases.append(case)
    return cases


def gradient_bytes(case: BenchCase) -> int:
    """All gradients that are reduced, of the whole model in fp32: at least what a rank reduces."""
    is_alone = case.plan.layout.num_ranks == 1
    return 0 if is_alone else 4 * case.plan.profile.num_trained_parameters


def program_of(case: BenchCase) -> tuple[object, ...]:
    """What the ranks run: cases with the same do the same, whatever their job files say.

    Buckets that hold all gradients are one size. Left out, DDP's first is of 1 MiB.
    """
    bucket, whole = case.job.spec.train.bucket, gradient_bytes(case)
    if (_FIRST_BUCKET if bucket == "auto" else bucket) >= whole:
        bucket = whole
    spec = _with_train(case.job, bucket="auto").spec
    return replace(spec, layout=LayoutSpec(), plan=PlanSpec()), case.plan.layout, bucket


def measure(
    case: BenchCase,
    stretch: Stretch,
    *,
    limit_s: float,
    on_progress: OnProgress = lambda line: None,
) -> Measured:
    """Run a case on ranks of this machine.

    Raises:
        JobError, PlanError: What the ranks say a person can fix.
        RunError: `R041`, a rank failed otherwise, or they took too long.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        run = create_run(case.job, case.plan, folder=Path(name) / "run", runs=Path(name))
        count = case.plan.layout.num_ranks
        ranks = [_rank(rank, count, run, case.plan, stretch) for rank in range(count)]
        run_ranks(ranks, limit_s=limit_s, on_progress=on_progress, failing=_FAILING)
        times = tuple(read_facts(_times_file(run, rank), RankTimes) for rank in range(count))
    spec = case.job.spec
    return Measured(
        plan=case.plan,
        tokens_per_sample=spec.data.seq_len if spec.program is None else None,
        notes=case.notes,
        ranks=times,
    )


def _on_this_machine(job: Job, count: int) -> tuple[Job, list[str]]:
    """The job on one node of `count` ranks, in steps that never evaluate, save or drill."""
    from paceline.topology import find_cluster

    spec, notes = job.spec, []
    cluster = replace(spec.cluster, nodes=1, per_node=count, rendezvous_port="auto")
    if cluster.accelerator not in ("auto", "cpu"):
        asked = find_cluster(spec.cluster, job)
        if not asked.is_local:
            cluster = replace(
                cluster, accelerator="auto", memory="auto", network="auto", rdma="auto"
            )
            notes.append(f"measured on this machine; the job asks for {asked.name}")
    elif spec.cluster.nodes > 1:
        notes.append(f"one node; the job asks for {spec.cluster.nodes}, simulated on this machine")
    quiet = replace(
        spec,
        cluster=cluster,
        checkpoint=replace(spec.checkpoint, every=_FOREVER),
        evaluate=replace(spec.evaluate, every=_FOREVER, samples=1)
        if measures_loss(spec)
        else spec.evaluate,
        metrics=MetricsSpec(),
        drill=replace(spec.drill, kill=[], faults=[]),
        plan=replace(spec.plan, objective="time", budget=None, deadline=None),
    )
    return replace(job, spec=quiet), notes


def _with_train(job: Job, **values: Any) -> Job:
    return replace(job, spec=replace(job.spec, train=replace(job.spec.train, **values)))


def _planned(job: Job, count: int, facts: Any, notes: list[str]) -> BenchCase:
    """As it is asked for; where no such layout exists on so many ranks, with the nearest one."""
    try:
        plan = plan_job(job, facts)
    except PlanError:
        layout, changes = adapted(job.spec.layout, count)
        if not changes:
            raise
        job, notes = replace(job, spec=replace(job.spec, layout=layout)), [*notes, *changes]
        plan = plan_job(job, facts)
    # Ranks make as many steps as they are told; the learning rate's schedule does not matter.
    return BenchCase(job=_with_train(job, steps=_FOREVER), plan=plan, notes=tuple(notes))


def adapted(layout: Any, count: int) -> tuple[Any, list[str]]:
    """A job's fixed layout, made possible on `count` ranks, and what became of it.

    Every fixed degree becomes the largest divisor of itself that is left room for, tensor first;
    the data ranks are what remains.
    """
    changed: dict[str, Any] = {}
    left = count
    for axis in ("tensor", "pipeline", "context"):
        asked = getattr(layout, axis)
        if asked == "auto":
            continue
        changed[axis] = gcd(asked, left)
        left //= changed[axis]
    if layout.data != "auto" and layout.data != left:
        changed["data"] = "auto"
    dp_cp = left * (changed.get("context") or 1)
    if layout.expert != "auto":
        changed["expert"] = gcd(layout.expert, dp_cp)
    if layout.sharding not in ("auto", "none") and dp_cp == 1:
        changed |= {"sharding": "auto", "shard": "auto"}
    elif layout.sharding == "hybrid" and layout.shard != "auto" and dp_cp % layout.shard:
        changed |= {"shard": "auto"}
    if changed.get("pipeline") == 1:
        changed |= {"schedule": "auto", "chunks": "auto"}
    if layout.offload != "auto" and dp_cp == 1:
        changed |= {"offload": "auto"}
    notes = [
        f"layout.{name} {value}, not {getattr(layout, name)}"
        for name, value in changed.items()
        if getattr(layout, name) != value
    ]
    return replace(layout, **changed), notes


def _on_count(error: PacelineError, count: int) -> PacelineError:
    ranks = f"{count} rank{'s' if count > 1 else ''}"
    return type(error)(
        *(
            replace(problem, where=f"--ranks {ranks.split()[0]}: {problem.where}")
            for problem in error.problems
        )
    )


def _times_file(run: RunFolder, rank: int) -> Path:
    return run.path / f"times-{rank}.json"


def _rank(rank: int, world: int, run: RunFolder, plan: Plan, stretch: Stretch) -> RankProcess:
    command = [sys.executable, "-m", "paceline.runtime.bench", "--run", str(run.path)]
    command += ["--rank", str(rank), "--world", str(world), "--parent", str(os.getpid())]
    command += ["--warm-up", str(stretch.warm_up), "--timed", str(stretch.timed)]
    command += ["--profiled", str(stretch.profiled)]
    threads = max(1, int(plan.cluster.cores_per_rank or 1))  # as a run's agent does
    times_file = _times_file(run, rank)

    def read_problems() -> Sequence[Problem]:
        return read_facts(times_file, RankTimes).problems if times_file.exists() else ()

    return RankProcess(
        rank,
        command,
        log=run.rank_log(rank),
        environment=surroundings(threads if plan.cluster.backend == "gloo" else None),
        mark="bench: ",
        read_problems=read_problems,
    )
