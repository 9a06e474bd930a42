"""`paceline drill`: break the job on purpose, and prove that it comes through."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, json_option, runs_option, set_option, timeout_option
from paceline.cli.screen import say, show
from paceline.errors import JobError

if TYPE_CHECKING:
    from paceline.check.drill.oracle import Drilled, Reference, Verdict
    from paceline.job import Job
    from paceline.launch.drill import Ran
    from paceline.plan import Plan
    from paceline.prepare import TrainedOn
    from paceline.record.soak import SoakLine

_USUAL = 40
"""Steps of a drill at most when `--steps` is left out and no fault comes later."""

_FIRST, _QUIET = 2, 5
"""The first step that a random fault may hit, and the steps after the last that none does."""

_ROOM = 10
"""Steps after the last fault when `--steps` is left out: enough to see the run go on."""


@click.command()
@click.argument("job_file", metavar="JOB", required=False, type=PathName(path_type=Path))
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="`kill rank=1 step=20 phase=backward`; see --list. May be given again.",
)
@click.option(
    "--random", "num_random", type=click.IntRange(min=1), help="This many faults, drawn at random."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random faults.")
@click.option(
    "--soak",
    "num_soak",
    type=click.IntRange(min=1),
    help="This many random schedules, of 1 to 5 faults each.",
)
@click.option("--kinds", metavar="KIND,...", help="Kinds to draw from. Left out: the quick ones.")
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    help="Optimizer steps of the run. Left out: the job's, but at most "
    f"{_USUAL} unless a fault comes later; then {_ROOM} more than its step.",
)
@click.option(
    "--model",
    "model",
    type=click.Choice(["job", "small"]),
    default="job",
    show_default=True,
    help="`small` trains a tiny decoder instead of the job's model.",
)
@click.option(
    "--reference",
    type=PathName(path_type=Path),
    help="A finished run of the same job without faults. [default: one is run, once for each job]",
)
@timeout_option(3600.0, "Seconds after which a run counts as hung.")
@click.option("--list", "as_list", is_flag=True, help="Show the kinds and the fault matrix.")
@runs_option
@set_option
@json_option
def command(
    job_file: Path | None,
    faults: tuple[str, ...],
    num_random: int | None,
    seed: int,
    num_soak: int | None,
    kinds: str | None,
    steps: int | None,
    model: str,
    reference: Path | None,
    limit_s: float,
    as_list: bool,
    runs: Path,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Break the job in JOB on purpose, and prove that it recovers.

    The job runs once without faults, then with them. Every recovery is timed (detect, fence, meet,
    state, first step), and the record must name the fault. Then the two runs are compared:
    the SHA-256 of parameters and optimizer state is equal (after a change of the number of ranks:
    the loss of every step, up to rounding), every sample was used exactly once, no finished step
    was lost while a rank that has it is alive, and no processes or files are left behind.

    A soak (--soak) injects many fault schedules into one long run, and compares the SHA-256 of the
    state after each schedule. Processes really die; only the time to start each run is skipped.
    `soak.jsonl` keeps what is done; the same command resumes from it.

    \b
    Examples:
      paceline drill job.yaml --fault "kill rank=1 step=20"
      paceline drill job.yaml --fault "kill rank=0 step=9 phase=apply"
      paceline drill job.yaml --random 5 --seed 7
      paceline drill job.yaml --soak 1000 --model small
      paceline drill --list

    \b
    Exit codes:
      0  the run recovered as it should
      1  something did not hold
      2  the job or a fault is wrong
      3  no layout fits
      4  the undisturbed run failed
    """
    if as_list:
        _show_list(as_json)
        return 0
    if job_file is None:
        raise click.UsageError("Give a job file, or --list.")
    if sum([bool(faults), num_random is not None, num_soak is not None]) > 1:
        raise click.UsageError("Give one of --fault, --random and --soak.")
    from paceline.check.drill.schedule import QUICK

    chosen = tuple(kinds.split(",")) if kinds is not None else QUICK
    _check_texts(faults)
    _check_kinds(chosen)
    job = _job(job_file, overrides, model)
    if num_soak is not None:
        return _soak(
            job, num=num_soak, seed=seed, kinds=chosen, runs=runs, limit_s=limit_s, as_json=as_json
        )
    return _drill(
        job,
        faults,
        num_random=num_random,
        seed=seed,
        kinds=chosen,
        steps=steps,
        reference=reference,
        runs=runs,
        limit_s=limit_s,
        as_json=as_json,
    )


def _drill(
    job: "Job",
    faults: tuple[str, ...],
    *,
    num_random: int | None,
    seed: int,
    kinds: Sequence[str],
    steps: int | None,
    reference: Path | None,
    runs: Path,
    limit_s: float,
    as_json: bool,
) -> int:
    from paceline.check.drill.oracle import judge
    from paceline.cli.prepare_progress import show_preparing
    from paceline.launch.drill import check_faults, run_to_end
    from paceline.prepare import find_data
    from paceline.record.run import create_run
    from paceline.report.drill_text import verdict_lines

    if num_random is not None:
        faults = _drawn(job, num_random, seed=seed, kinds=kinds, steps=steps)
    asked = job.spec.train.steps
    job = _with_faults(job, faults, steps)
    if not job.spec.drill.all_faults:
        raise click.UsageError("There is no fault: give --fault, --random, or drill.faults in JOB.")
    plan, data = plan_of(job), find_data(job, show_preparing())
    JobError.raise_for(check_faults(job, plan))
    length = _length(job.spec.train.steps, asked, given=steps is not None)
    say(f"steps        {length}")
    calm = _reference(job, plan, reference, runs, data, limit_s)
    run = create_run(job, plan, folder=None, runs=runs, data=data)
    say(f"with faults  {run.path}")
    ran = run_to_end(run, on_event=_tell, limit_s=limit_s)
    verdict = judge(drilled(job, plan, ran, data), reference_of(calm))
    answer = _data(verdict, ran, calm, seed if num_random is not None else None)
    answer |= {"steps": job.spec.train.steps, "job_steps": asked}
    (run.path / "drill.json").write_text(json.dumps(answer, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        for line in [*verdict_lines(verdict, ran), f"steps   {length}"]:
            show(line)
    return 0 if verdict.is_right else 1


def _soak(
    job: "Job",
    *,
    num: int,
    seed: int,
    kinds: Sequence[str],
    runs: Path,
    limit_s: float,
    as_json: bool,
) -> int:
    from paceline.check.drill.soak import MOST_FAULTS, StretchJudge, draw, summarise
    from paceline.cli.prepare_progress import show_preparing
    from paceline.launch.soak import Soak, run_soak, soak_job
    from paceline.prepare import find_data
    from paceline.report.drill_text import soak_lines

    job = soak_job(job, num)
    plan, data = plan_of(job), find_data(job, show_preparing())
    soak = Soak(
        job=job,
        plan=plan,
        data=data,
        schedule=lambda seed: draw(seed, plan.layout.num_ranks, kinds),
        judge=StretchJudge(job, plan, data),
        runs=runs,
        limit_s=limit_s,
    )
    say(f"{num} schedules of 1 to {MOST_FAULTS} faults on {plan.layout.name}, seeds from {seed}")
    lines = run_soak(soak, num=num, seed=seed, on_note=say, on_line=_say_soaked)
    summary = summarise(lines)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        show("\n".join([*soak_lines(summary), f"every schedule: {soak.ledger}"]))
    return 1 if summary["failed"] else 0


def _say_soaked(line: "SoakLine", left_s: float) -> None:
    say(
        f"{'ok' if line.passed else 'FAILED'} seed {line.seed}: {line.happened} faults, "
        f"{line.recoveries} recoveries, {line.steps_lost} steps lost; {line.says}; "
        f"{left_s:.0f} s left"
    )


def _drawn(
    job: "Job", num: int, *, seed: int, kinds: Sequence[str], steps: int | None
) -> tuple[str, ...]:
    """So many random faults, no more than one for each step that can be hit: of more, some would
    find no step finished between them, which is what `recovery.max_restarts` ends a run for."""
    from paceline.check.drill.schedule import random_schedule

    last = max(_FIRST + 1, (steps or min(job.spec.train.steps, _USUAL)) - _QUIET)
    most = last - _FIRST + 1
    if num > most:
        raise JobError.of(
            code="R061",
            what=f"{num} faults do not fit into a run of {last + _QUIET} steps: one a step is "
            f"the most, and steps {_FIRST} to {last} can be hit",
            where="--random",
            fix=f"--random {most}, or --steps {num + _FIRST - 1 + _QUIET}; "
            "--soak N draws many short schedules",
        )
    return random_schedule(
        seed,
        num_faults=num,
        num_ranks=plan_of(job).layout.num_ranks,
        first_step=_FIRST,
        last_step=last,
        kinds=kinds,
    )


def _length(steps: int, asked: int, *, given: bool) -> str:
    """How many of the job's steps are run, and why not as many as it has."""
    if steps == asked:
        return f"all {asked} of the job"
    if given:
        return f"{steps} of {asked}, as --steps says"
    if steps > asked:
        return f"{steps}, the job has {asked}: {_ROOM} after the last fault"
    return (
        f"{steps} of {asked}: enough to see the faults and the run go on; --steps {asked} for all"
    )


def _job(job_file: Path, overrides: tuple[str, ...], model: str) -> "Job":
    from paceline.cli.job_input import read_job
    from paceline.job import DecoderSpec, MetricsSpec, ModelSpec

    job = read_job(job_file, overrides)
    # A drill compares the states at the end, whatever the job's own runs leave out, and its runs
    # are sent nowhere.
    recovery = replace(job.spec.recovery, final_digest=True)
    job = replace(job, spec=replace(job.spec, recovery=recovery, metrics=MetricsSpec()))
    if model == "job":
        return job
    decoder = DecoderSpec(layers=2, hidden=32, heads=2)
    spec = replace(
        job.spec, model=ModelSpec(decoder=decoder), data=replace(job.spec.data, seq_len=32)
    )
    return replace(job, spec=spec)


def _with_faults(job: "Job", faults: Sequence[str], steps: int | None) -> "Job":
    """The job with these faults instead of its own, and as many steps as it takes."""
    from paceline.job.fault_grammar import parse_fault

    spec = job.spec
    if faults:
        spec = replace(spec, drill=replace(spec.drill, kill=[], faults=list(faults)))
    last = max((parse_fault(text).step for text in spec.drill.all_faults), default=0)
    if steps is None:
        steps = max(min(spec.train.steps, _USUAL), last + _ROOM)
        if last > spec.train.steps:  # refused by check_faults
            steps = spec.train.steps
    return replace(job, spec=replace(spec, train=replace(spec.train, steps=steps)))


def plan_of(job: "Job") -> "Plan":
    """The plan of what is run here, checked.

    Raises:
        JobError, PlanError: It cannot be run.
    """
    from paceline.launch.plannable import planned
    from paceline.launch.ready import check_can_run

    plan = planned(job)
    JobError.raise_for(check_can_run(job, plan))
    return plan


def _reference(
    job: "Job",
    plan: "Plan",
    given: Path | None,
    runs: Path,
    data: "TrainedOn | None",
    limit_s: float,
) -> "Ran":
    from paceline.launch.drill import read_run, run_reference

    if given is not None:
        return read_run(given)
    ran = run_reference(job, plan, runs, data, on_event=lambda event: None, limit_s=limit_s)
    how = f"{ran.seconds:.1f} s" if ran.seconds else "from an earlier drill"
    say(f"undisturbed  {ran.run.path}, {how}, sha256 {(ran.digest or '')[:16]}")
    return ran


def drilled(job: "Job", plan: "Plan", ran: "Ran", data: "TrainedOn | None") -> "Drilled":
    """What the oracle is told of a run."""
    from paceline.check.drill.ledger import order_in, pure_digest
    from paceline.check.drill.oracle import Drilled
    from paceline.parallel.replicas import replicas_of

    spec, known = job.spec, None
    if data is not None and spec.program is None:
        order = order_in(data, spec.data.seq_len)
        digest_of = pure_digest(spec.train.seed, plan.layout.global_batch, order)
        known = {step: digest_of(step) for step in range(1, spec.train.steps + 1)}
    return Drilled(
        faults=spec.drill.all_faults,
        events=ran.events,
        lines=ran.lines,
        num_steps=spec.train.steps,
        ranks_per_node=plan.cluster.ranks_per_node,
        replicas=replicas_of(plan.layout),
        max_restarts=spec.recovery.max_restarts,
        left_behind=ran.left_behind,
        digest_of_samples=known,
    )


def reference_of(ran: "Ran") -> "Reference":
    """What the oracle compares with."""
    from paceline.check.drill.oracle import Reference

    losses = {line.step: line.loss for line in ran.lines}
    return Reference(digest=ran.digest, digests=ran.digests, losses=losses)


def _data(verdict: "Verdict", ran: "Ran", calm: "Ran", seed: int | None) -> dict[str, Any]:
    import msgspec

    outcomes = [
        {
            **{k: v for k, v in asdict(outcome).items() if k != "recovered"},
            "recovered": msgspec.to_builtins(outcome.recovered),
        }
        for outcome in verdict.outcomes
    ]
    return {
        "passed": verdict.is_right,
        "run": str(ran.run.path),
        "reference": str(calm.run.path),
        "seed": seed,
        "seconds": ran.seconds,
        "steps_lost": verdict.steps_lost,
        "faults": outcomes,
        "checks": [asdict(check) for check in verdict.checks],
    }


def _tell(event: object) -> None:
    from paceline.report.event_text import describe

    text = describe(event)  # type: ignore[arg-type]
    if text is not None:
        say(f"  {text}")


def _check_texts(faults: Sequence[str]) -> None:
    from paceline.errors import JobError, Problem
    from paceline.job.fault_grammar import GRAMMAR, parse_fault

    problems = []
    for text in faults:
        try:
            parse_fault(text)
        except ValueError as error:
            problems.append(
                Problem(code="R061", what=str(error), where="--fault", fix=f"write it as {GRAMMAR}")
            )
    if problems:
        raise JobError(*problems)


def _check_kinds(kinds: Sequence[str]) -> None:
    from paceline.job.fault_grammar import KINDS

    unknown = [kind for kind in kinds if kind not in KINDS or "sample" in KINDS[kind].takes]
    if unknown:
        raise click.UsageError(f"--kinds: {', '.join(unknown)}; known are {', '.join(KINDS)}.")


def _show_list(as_json: bool) -> None:
    from paceline.job.fault_grammar import GRAMMAR, KINDS, MATRIX, PHASES, rows_of

    if as_json:
        kinds = {name: asdict(kind) | {"rows": rows_of(name)} for name, kind in KINDS.items()}
        matrix = [asdict(row) for row in MATRIX]
        click.echo(json.dumps({"kinds": kinds, "phases": PHASES, "matrix": matrix}, indent=2))
        return
    show(f"{GRAMMAR}\n\nKinds:")
    for name, kind in KINDS.items():
        show(f"  {name:<12} {kind.does}")
    show(f"\nPhases: {', '.join(PHASES)}\n\nThe fault matrix:")
    for row in MATRIX:
        how = "; ".join(row.faults) or row.elsewhere or f"SKIPPED: {row.skipped}"
        show(f"  {row.number:>2}  {row.title}\n        {how}")
    skipped = [str(row.number) for row in MATRIX if row.skipped]
    show(f"\n{len(skipped)} rows skipped: {', '.join(skipped)}")
