"""`paceline run`: plan, start, watch, recover, report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, json_option, runs_option, set_option

if TYPE_CHECKING:
    from paceline.cli.run_options import Asked
    from paceline.job import Job, Script
    from paceline.plan import Plan
    from paceline.record.run import RunFolder


@click.command()
@click.argument("job_file", metavar="JOB", required=False, type=PathName(path_type=Path))
@click.argument("arguments", metavar="", required=False, nargs=-1)
@click.option(
    "--script",
    type=PathName(path_type=Path),
    help="Start this Python script, which need not know Paceline, instead of a job; its arguments "
    "follow `--`. Output, steps and losses are shown as they come.",
)
@click.option(
    "--with",
    "engine",
    type=click.Choice(["torchrun", "accelerate", "deepspeed"]),
    help="With --script: start it through this engine's launcher, on the ranks planned for JOB.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="With --script: how many processes. [default: one for each GPU, or 1]",
)
@click.option(
    "--ranks",
    metavar="RANKS",
    help="With --script: whose output is shown: all (with the rank before each line), none, or "
    "numbers such as 0,3. Every rank's is in the run's logs/. [default: 0]",
)
@click.option(
    "--profile",
    "profiles",
    is_flag=True,
    help="With --script: run a few steps of rank 0 under torch.profiler and show where their time "
    "goes, phases and communication. The script stays as it is.",
)
@click.option(
    "--silence",
    metavar="TIME",
    help="With --script: start all processes again when none has printed anything for so long "
    "(30m), or off. [default: auto: 20 times the longest pause between prints, at least 10m, once "
    "steps or losses are printed]",
)
@click.option(
    "--resume",
    "resume",
    metavar="RUN",
    type=PathName(path_type=Path),
    help="Resume the run in this folder from its newest valid checkpoint, with the settings of "
    "JOB; without JOB, with its own.",
)
@click.option(
    "--check",
    "checks",
    is_flag=True,
    help="With --resume: only check whether the job (JOB, or the run's own) can resume there: exit "
    "code 0 as it is, 1 after a conversion, 5 not. RUN may also be a checkpoint of DeepSpeed, "
    "Megatron-LM, Accelerate or Hugging Face.",
)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    type=PathName(path_type=Path),
    help="Begin the new run with this checkpoint: another run's, or weights converted by "
    "`paceline checkpoint convert`.",
)
@click.option(
    "--out",
    "out",
    type=PathName(path_type=Path),
    help="Folder of the new run. [default: RUNS/NAME-DATE-TIME]",
)
@click.option(
    "--report/--no-report",
    "reports",
    default=True,
    show_default=True,
    help="Write the run's page at its end; `paceline report RUN` writes it at any time.",
)
@click.option(
    "--on",
    "place",
    metavar="PLACE",
    help="Where: local, ssh, slurm, srun, ray, kubernetes, sky. [default: this machine; with "
    "--resume, where the run was]",
)
@click.option(
    "--hosts",
    metavar="HOSTS",
    help="With --on ssh: node-a,node-b or a hostfile, instead of the job's ssh.hosts. Hosts beyond "
    "cluster.nodes are spares.",
)
@click.option(
    "--alerts",
    "alerts",
    metavar="FILE",
    type=PathName(path_type=Path),
    help="Alert rules in a file of their own, in place of the job's section `alerts`.",
)
@click.option(
    "--preflight/--no-preflight",
    "looks",
    default=None,
    help="Look at every machine before a job starts there: limits, room, folders, interfaces, "
    "versions. [default: a quick look; --preflight also tests connections between nodes, in "
    "seconds]",
)
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="Start even if this preflight check fails; kept in the run's preflight.json. "
    "May be given again.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print exactly what would be submitted or started, and where, and end.",
)
@click.option("--verbose", is_flag=True, help="Print the whole plan before the run.")
@runs_option
@set_option
@json_option
def command(
    job_file: Path | None,
    arguments: tuple[str, ...],
    script: Path | None,
    engine: str | None,
    nproc: int | None,
    ranks: str | None,
    profiles: bool,
    silence: str | None,
    resume: Path | None,
    checks: bool,
    source: Path | None,
    out: Path | None,
    reports: bool,
    place: str | None,
    hosts: str | None,
    alerts: Path | None,
    looks: bool | None,
    allowed: tuple[str, ...],
    dry_run: bool,
    verbose: bool,
    runs: Path,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Train the job in JOB, here or at PLACE: plan, start, watch, recover, report.

    Ctrl-C stops the workers at the next step boundary and saves a checkpoint; press it twice to
    stop at once. Everything is kept in the run's folder.

    \b
    Examples:
      paceline run job.yaml
      paceline run job.yaml --set train.steps=50 --out /tmp/try
      paceline run --resume runs/my-job-20261121-101500
      paceline run --resume runs/my-job-... --set cluster.per_node=1
      paceline run job.yaml --resume runs/my-job-20261121-101500
      paceline run job.yaml --resume global_step100 --check
      paceline run --script train.py -- --lr 0.1
      paceline run --script train.py --nproc 4 --ranks all --silence 30m
      paceline run --script train.py --with accelerate job.yaml -- --lr 0.1
      paceline run job.yaml --on ssh --hosts node-a,node-b
      paceline run job.yaml --alerts alerts.yaml
      paceline run job.yaml --allow checkpoint-room
      paceline run job.yaml --on slurm --set slurm.partition=gpu --dry-run
    """
    from paceline.cli.run_options import Asked
    from paceline.cli.run_preflight import Looking

    asked = Asked(
        place=place,
        hosts=hosts,
        alerts=alerts,
        looking=Looking(wanted=looks, allowed=allowed),
        dry_run=dry_run,
        source=source,
        out=out,
        runs=runs,
        ranks=ranks,
        reports=reports,
        verbose=verbose,
        json=as_json,
    )
    if source is not None and (resume is not None or script is not None):
        raise click.UsageError("--from begins a new run of a job: leave --resume and --script out.")
    only = {"--nproc": nproc, "--silence": silence, "--profile": profiles}
    if script is not None:
        if resume is not None:
            raise click.UsageError("--resume starts the run's own script; leave --script out.")
        if engine is not None:
            from paceline.cli.run_engine import start_with

            _refuse_with(only)
            return start_with(engine, script, job_file, arguments, overrides, asked)
        from paceline.cli.run_script import make_program

        given = [str(job_file), *arguments] if job_file is not None else []
        started = make_program(script, given, nproc, silence, overrides, profiles=profiles)
        return _start_script(started, asked)
    if engine is not None:
        raise click.UsageError("--with goes with --script.")
    for option, value in only.items():
        if value:
            raise click.UsageError(f"{option} goes with --script.")
    if arguments:
        raise click.UsageError(f"Got unexpected extra argument ({arguments[0]})")
    if checks:
        if resume is None:
            raise click.UsageError("--check goes with --resume.")
        from paceline.cli.resume_check import check_resume

        return check_resume(resume, job_file, overrides, place=place, hosts=hosts, as_json=as_json)
    if job_file is None and resume is None:
        raise click.UsageError("Give a job file, or --resume with a run's folder.")
    if resume is not None and out is not None:
        raise click.UsageError("--out is for new runs; --resume writes to the run's own folder.")
    if resume is not None:
        return _resume(resume, job_file, overrides, asked)
    assert job_file is not None
    from paceline.job import load_script

    program = load_script(job_file, overrides)
    return _start_script(program, asked) if program else _start_job(job_file, overrides, asked)


def _start_job(job_file: Path, overrides: tuple[str, ...], asked: "Asked") -> int:
    import shutil

    from paceline.check.preflight.look import keep_look, look_before_run
    from paceline.cli.job_input import count_samples_at, read_job
    from paceline.cli.prepare_progress import show_read
    from paceline.cli.run_job import (
        begin_with,
        check_and_plan,
        find_data_there,
        find_source,
        look_at_data_there,
        with_alerts,
        with_hosts_of,
    )
    from paceline.errors import JobError
    from paceline.launch.places import find_place
    from paceline.record.run import create_run, fresh_name

    asked.check_is_job()
    place = asked.place or "local"
    kind = find_place(place).kind
    asked.looking.check(place, is_job=True)
    job = read_job(job_file, overrides, count=count_samples_at(place))
    job = with_alerts(with_hosts_of(job, asked.hosts, place), asked.alerts)
    data = look_at_data_there(job, place, dry_run=asked.dry_run)
    plan = check_and_plan(job, place, dry_run=asked.dry_run)
    source = find_source(asked.source, job, place) if asked.source is not None else None
    if plan.engine != "paceline" and place != "kubernetes":
        if source is not None:
            raise click.UsageError("--from begins a run of Paceline's own runtime.")
        from paceline.cli.run_engine import start_engine

        return start_engine(plan.engine, job, plan, None, place, asked)
    if asked.dry_run:
        folder = asked.out or fresh_name(asked.runs, job.spec.name)
        return asked.show(place, job, plan, folder)
    data = data or find_data_there(job, place)
    show_read(data)
    folder = asked.out or asked.runs
    looked = None
    if place == "local" and asked.looking.wanted is not False:
        looked = look_before_run(job, plan, folder, asked.looking.allowed)
    run = create_run(job, plan, folder=asked.out, runs=asked.runs, data=data)
    if source is not None:
        begin_with(run, source)
    if looked is not None:
        keep_look(run, looked, job)
    if kind == "queued":
        return asked.submit(place, job, plan, run, is_new=True)
    try:
        return _attend(place, job, plan, run, asked, resumed=False)
    except JobError:
        if not run.journal_file.exists():  # refused: nothing was started, and nothing stays
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def _refuse_with(only: dict[str, Any]) -> None:
    for option, value in only.items():
        if value:
            raise click.UsageError(f"--with plans the ranks and starts them: leave {option} out.")


def _start_script(program: "Script", asked: "Asked") -> int:
    from paceline.cli.run_job import with_alerts, with_hosts_of
    from paceline.cli.run_script import check_program, ranks_shown
    from paceline.launch.places import find_place
    from paceline.record.run import create_script_run, fresh_name

    program = with_alerts(program, asked.alerts)
    place = asked.place or "local"
    asked.looking.check(place, is_job=False)
    program = with_hosts_of(program, asked.hosts, place)
    if find_place(place).kind == "queued":
        if asked.ranks is not None or program.spec.profile:
            raise click.UsageError(f"--ranks and --profile are for scripts here, not {place}.")
        if asked.dry_run:
            folder = asked.out or fresh_name(asked.runs, program.spec.name)
            return asked.show(place, program, None, folder)
        run = create_script_run(program, folder=asked.out, runs=asked.runs)
        return asked.submit(place, program, None, run, is_new=True)
    check_program(program, place)
    ranks_shown(asked.ranks, program)
    if asked.dry_run:
        folder = asked.out or fresh_name(asked.runs, program.spec.name)
        return asked.show(place, program, None, folder)
    run = create_script_run(program, folder=asked.out, runs=asked.runs)
    return asked.attend(program, run, place, is_new=True)


def _resume(folder: Path, job_file: Path | None, overrides: tuple[str, ...], asked: "Asked") -> int:
    from paceline.check.preflight.look import keep_look, look_before_run
    from paceline.cli.job_input import count_samples_at, read_job
    from paceline.cli.run_job import changed_settings, go_on, with_hosts_of
    from paceline.cli.run_script import check_program
    from paceline.errors import JobError
    from paceline.launch.handover import check_not_queued
    from paceline.launch.places import find_place
    from paceline.record.placement import read_placement
    from paceline.record.run import open_run

    run = open_run(folder)
    before = read_placement(run.path)
    place = asked.place or (before.place if before is not None else "local")
    kind = find_place(place).kind
    program = run.script()
    asked.looking.check(place, is_job=program is None)
    if program is not None:
        if overrides or asked.alerts is not None or job_file is not None:
            raise JobError.of(
                code="R051",
                what="the run of a script is resumed as it was started",
                where="--set" if overrides else "--alerts" if asked.alerts else "JOB",
                fix="leave it out, or start a new run",
            )
        program = with_hosts_of(program, asked.hosts, place)
        if kind == "queued":
            if asked.dry_run:
                return asked.show(place, program, None, run.path)
            return asked.submit(place, program, None, run, is_new=False)
        check_program(program, place)
        if asked.dry_run:
            return asked.show(place, program, None, run.path)
        if place != "srun":
            check_not_queued(run)
        return asked.attend(program, run, place)
    asked.check_is_job()
    if place != "srun":
        check_not_queued(run)
    changes = overrides or asked.hosts is not None or job_file is not None
    if kind == "attached" and not changes and not asked.dry_run:
        from paceline.launch.outputs import lacks_outputs

        if lacks_outputs(run):
            from paceline.cli.run_outputs import make_up_outputs

            return make_up_outputs(run, reports=asked.reports, as_json=asked.json)
    other = None
    if job_file is not None:
        other = read_job(job_file, overrides, count=count_samples_at(place))
    job, plan = go_on(
        run, overrides, place=place, hosts=asked.hosts, other=other, alerts=asked.alerts
    )
    for line in changed_settings(run.job(), job) if other is not None else ():
        click.echo(f"changed     {line}", err=True)
    if plan.engine != "paceline" and place != "kubernetes":
        raise JobError.of(
            code="R015",
            what=f"the run was made for {plan.engine} in pods, and has no files to start elsewhere",
            where="--on",
            fix="resume it with --on kubernetes, or start a new run of its job",
        )
    if asked.dry_run:
        return asked.show(place, job, plan, run.path)
    if kind == "queued":
        return asked.submit(place, job, plan, run, is_new=False)
    if place == "local" and asked.looking.wanted is not False:
        keep_look(run, look_before_run(job, plan, run.path, asked.looking.allowed), job)
    return _attend(place, job, plan, run, asked, resumed=True)


def _attend(
    place: str, job: "Job", plan: "Plan", run: "RunFolder", asked: "Asked", *, resumed: bool
) -> int:
    """Run it to its end from here."""
    from paceline.check.preflight.look import inspection_of
    from paceline.cli.progress import ProgressView
    from paceline.cli.report import try_report
    from paceline.cli.run_job import check_and_plan
    from paceline.cli.run_outputs import make_and_show, summary
    from paceline.launch.attached import run_attached
    from paceline.launch.refit import refit
    from paceline.record.events import read_events

    inspection, looking = None, asked.looking
    if looking.wanted is not False and place != "local":
        calls = looking.wanted is True
        inspection = inspection_of(job, plan, place, run, calls=calls, allowed=looking.allowed)
    view = ProgressView(
        job=job,
        run=run,
        plan=plan,
        before=read_events(run.events_file) if resumed else None,
        to_stderr=asked.json,
        verbose=asked.verbose,
    )
    while True:
        state = run_attached(
            job,
            plan,
            run,
            place=place,
            inspection=inspection,
            on_event=view.event,
            on_progress=view.progress,
            on_note=view.note,
        )
        again = refit(job, plan, run, state, lambda it: check_and_plan(it, place), view.event)
        if again is None:
            break
        job, plan = again.job, again.plan
        view.plan = plan
    evaluate = job.spec.evaluate
    if state.outcome == "finished" and (evaluate.prompts is not None or evaluate.tasks):
        make_and_show(run, view.note)
    report, why_not = try_report(run, wanted=asked.reports)
    view.closing(state, report, why_not)
    if asked.json:
        click.echo(json.dumps(summary(run, report), indent=2))
    return state.exit_code
