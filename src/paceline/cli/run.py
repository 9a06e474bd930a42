"""`paceline run`: plan, start, watch, recover, report."""

import json
import shlex
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, json_option, runs_option, set_option

if TYPE_CHECKING:
    from paceline.cli.run_preflight import Looking
    from paceline.plan import Plan
    from paceline.record.run import RunFolder
    from paceline.spec import Job, Script


@click.command()
@click.argument("job_file", metavar="JOB", required=False, type=PathName(path_type=Path))
@click.argument("arguments", metavar="", required=False, nargs=-1)
@click.option(
    "--script",
    type=PathName(path_type=Path),
    help="Start this Python script, which need not know Paceline, instead of a job; its arguments "
    "follow `--`.",
)
@click.option(
    "--with",
    "engine",
    type=click.Choice(["torchrun", "accelerate", "deepspeed"]),
    help="With --script: start it through this engine's launcher, on the ranks planned for JOB.",
)
@click.option(
    "--nproc", type=click.IntRange(min=1), help="With --script: how many processes. [default: 1]"
)
@click.option(
    "--resume",
    "resume",
    metavar="RUN",
    type=PathName(path_type=Path),
    help="Go on with the run in this folder, from its newest valid checkpoint.",
)
@click.option(
    "--check",
    "checks",
    is_flag=True,
    help="With --resume: only say whether the job (JOB, or the run's own) goes on from there as it "
    "is, after a conversion, or not. PATH may also be one checkpoint, of DeepSpeed, Megatron-LM, "
    "Accelerate or Hugging Face too. Ends with 0, 1 or 5.",
)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    type=PathName(path_type=Path),
    help="Begin the new run with this checkpoint: another run's, or weights that `paceline "
    "checkpoint convert` made one of.",
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
    help="Where: local, ssh, slurm, ... (docs/guides/places.md). [default: this machine; with "
    "--resume, where the run was]",
)
@click.option(
    "--hosts",
    metavar="HOSTS",
    help="With --on ssh: node-a,node-b or a hostfile, instead of the job's ssh.hosts. Hosts beyond "
    "cluster.nodes are spares.",
)
@click.option(
    "--preflight/--no-preflight",
    "looks",
    default=None,
    help="Look at every machine before a job starts there: limits, room, folders, interfaces, "
    "versions. [default: on the one visit that each gets anyway; --preflight lets nodes call each "
    "other too, in seconds]",
)
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="Start although this check of the look before fails; kept in the run's preflight.json. "
    "May be given again.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print exactly what would be submitted or started, and where, and end.",
)
@runs_option
@set_option
@json_option
def command(
    job_file: Path | None,
    arguments: tuple[str, ...],
    script: Path | None,
    engine: str | None,
    nproc: int | None,
    resume: Path | None,
    checks: bool,
    source: Path | None,
    out: Path | None,
    reports: bool,
    place: str | None,
    hosts: str | None,
    looks: bool | None,
    allowed: tuple[str, ...],
    dry_run: bool,
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
      paceline run job.yaml --resume global_step100 --check
      paceline run --script train.py --nproc 4 -- --lr 0.1
      paceline run --script train_accelerate.py --with accelerate job.yaml -- --lr 0.1
      paceline run job.yaml --on ssh --hosts node-a,node-b
      paceline run job.yaml --allow checkpoint-room
      paceline run job.yaml --on slurm --set slurm.partition=gpu --dry-run
    """
    from paceline.cli.run_preflight import Looking

    asked = _Asked(
        place=place,
        hosts=hosts,
        looking=Looking(wanted=looks, allowed=allowed),
        dry_run=dry_run,
        source=source,
        out=out,
        runs=runs,
        reports=reports,
        json=as_json,
    )
    if source is not None and (resume is not None or script is not None):
        raise click.UsageError("--from begins a new run of a job: leave --resume and --script out.")
    if script is not None:
        if resume is not None:
            raise click.UsageError("--resume goes on with a run as it is; leave --script out.")
        if engine is not None:
            return _start_with(engine, script, job_file, arguments, nproc, overrides, asked)
        given = [str(job_file), *arguments] if job_file is not None else []
        _refuse_job_without_engine(given)
        return _start_script(_script_of(script, given, nproc or 1, overrides), asked)
    if engine is not None:
        raise click.UsageError("--with goes with --script.")
    if nproc is not None:
        raise click.UsageError("--nproc goes with --script.")
    if arguments:
        raise click.UsageError(f"Got unexpected extra argument ({arguments[0]})")
    if checks:
        if resume is None:
            raise click.UsageError("--check goes with --resume.")
        from paceline.cli.resume_check import check_resume

        return check_resume(resume, job_file, overrides, place=place, hosts=hosts, as_json=as_json)
    if (job_file is None) == (resume is None):
        raise click.UsageError("Give a job file, or --resume with a run's folder.")
    if resume is not None and out is not None:
        raise click.UsageError("--out is for new runs; --resume goes on in the run's own folder.")
    if resume is not None:
        return _go_on(resume, overrides, asked)
    assert job_file is not None
    from paceline.spec import load_script

    program = load_script(job_file, overrides)
    return _start_script(program, asked) if program else _start_job(job_file, overrides, asked)


def _refuse_job_without_engine(given: list[str]) -> None:
    """A job file without --with would be an argument of a script that runs unplanned.

    What stands behind `--` is the script's own.
    """
    import sys

    first = given[0] if given else ""
    behind = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if first not in behind and first.endswith((".yaml", ".yml")):
        raise click.UsageError(
            f"{first} would only be an argument of the script: did you mean --with ENGINE, which "
            f"plans the ranks for it? Arguments of the script's own follow `--`: -- {first}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line says of a run, whatever it is of."""

    place: str | None
    hosts: str | None
    looking: "Looking"
    dry_run: bool
    source: Path | None
    out: Path | None
    runs: Path
    reports: bool
    json: bool

    def show(self, place: str, job: "Job | Script", plan: "Plan | None", folder: Path) -> int:
        """What would be submitted or started there."""
        from paceline.cli.run_dry import show_submission

        return show_submission(place, job, plan, folder, self.looking.options, as_json=self.json)


def _start_job(job_file: Path, overrides: tuple[str, ...], asked: _Asked) -> int:
    import shutil

    from paceline.cli.job_input import convert_weights, count_samples_at
    from paceline.cli.preparing import show_read
    from paceline.cli.run_job import (
        begin_with,
        check_and_plan,
        find_data_there,
        find_source,
        with_hosts_of,
    )
    from paceline.cli.run_preflight import keep_look, look_here
    from paceline.errors import JobError
    from paceline.launch.places import find_place
    from paceline.record.run import create_run, fresh_name
    from paceline.spec import load_job

    place = asked.place or "local"
    kind = find_place(place).kind
    asked.looking.check(place, is_job=True)
    job = load_job(job_file, overrides, count=count_samples_at(place))
    job = with_hosts_of(job, asked.hosts, place)
    convert_weights(job)
    data = find_data_there(job, place, prepare=False)
    plan = check_and_plan(job, place, dry_run=asked.dry_run)
    source = find_source(asked.source, job, place) if asked.source is not None else None
    if asked.dry_run:
        folder = asked.out or fresh_name(asked.runs, job.spec.name)
        return asked.show(place, job, plan, folder)
    data = data or find_data_there(job, place)
    show_read(data)
    folder = asked.out or asked.runs
    looked = look_here(job, plan, folder, asked.looking) if place == "local" else None
    run = create_run(job, plan, folder=asked.out, runs=asked.runs, data=data)
    if source is not None:
        begin_with(run, source)
    keep_look(run, looked)
    if kind == "queued":
        return _hand_over(place, job, plan, run, asked, is_new=True)
    try:
        return _attend(place, job, plan, run, asked, resumed=False)
    except JobError:
        if not run.journal_file.exists():  # refused: nothing was started, and nothing stays
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def _start_with(
    engine: str,
    script: Path,
    job_file: Path | None,
    arguments: tuple[str, ...],
    nproc: int | None,
    overrides: tuple[str, ...],
    asked: _Asked,
) -> int:
    from paceline.cli.run_with import prepare_with

    if nproc is not None:
        raise click.UsageError("--with plans the ranks: leave --nproc out.")
    if asked.place not in (None, "local") or asked.hosts is not None or asked.dry_run:
        raise click.UsageError("--with starts here: leave --on, --hosts and --dry-run out.")
    program, run = prepare_with(
        engine, script, job_file, arguments, overrides, out=asked.out, runs=asked.runs
    )
    return _run_script(program, run, asked.json, reports=asked.reports)


def _start_script(program: "Script", asked: _Asked) -> int:
    from paceline.cli.run_job import refuse_hosts
    from paceline.launch.places import find_place
    from paceline.record.run import create_script_run, fresh_name

    place = asked.place or "local"
    asked.looking.check(place, is_job=False)
    refuse_hosts(asked.hosts, place)
    if find_place(place).kind == "queued":
        if asked.dry_run:
            folder = asked.out or fresh_name(asked.runs, program.spec.name)
            return asked.show(place, program, None, folder)
        run = create_script_run(program, folder=asked.out, runs=asked.runs)
        return _hand_over(place, program, None, run, asked, is_new=True)
    _check_script(program, place)
    if asked.dry_run:
        return asked.show(place, program, None, program.folder)
    run = create_script_run(program, folder=asked.out, runs=asked.runs)
    return _run_script(program, run, asked.json, reports=asked.reports)


def _go_on(folder: Path, overrides: tuple[str, ...], asked: _Asked) -> int:
    from paceline.cli.run_job import go_on, refuse_hosts
    from paceline.cli.run_preflight import keep_look, look_here
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
        if overrides:
            raise JobError.of(
                code="R051",
                what="a program's run goes on as it was started",
                where="--set",
                fix="leave --set out, or start a new run",
            )
        refuse_hosts(asked.hosts, place)
        if kind == "queued":
            if asked.dry_run:
                return asked.show(place, program, None, run.path)
            return _hand_over(place, program, None, run, asked, is_new=False)
        _check_script(program, place)
        if asked.dry_run:
            return asked.show(place, program, None, run.path)
        return _run_script(program, run, asked.json, reports=asked.reports)
    if place != "srun":
        check_not_queued(run)
    if kind == "attached" and not overrides and asked.hosts is None and not asked.dry_run:
        from paceline.launch.outputs import lacks_outputs

        if lacks_outputs(run):
            return _make_up_outputs(run, asked)
    job, plan = go_on(run, overrides, place=place, hosts=asked.hosts)
    if asked.dry_run:
        return asked.show(place, job, plan, run.path)
    if kind == "queued":
        return _hand_over(place, job, plan, run, asked, is_new=False)
    if place == "local":
        keep_look(run, look_here(job, plan, run.path, asked.looking))
    return _attend(place, job, plan, run, asked, resumed=True)


def _attend(
    place: str, job: "Job", plan: "Plan", run: "RunFolder", asked: _Asked, *, resumed: bool
) -> int:
    """Run it to its end from here."""
    from paceline.cli.progress import ProgressView
    from paceline.cli.run_preflight import inspection_of
    from paceline.launch.attached import run_attached

    view = ProgressView(job=job, run=run, plan=plan, to_stderr=asked.json)
    view.opening(resumed=resumed)
    state = run_attached(
        job,
        plan,
        run,
        place=place,
        inspection=inspection_of(job, plan, place, run, asked.looking),
        on_event=view.event,
        on_progress=view.progress,
        on_note=view.note,
    )
    evaluate = job.spec.evaluate
    if state.outcome == "finished" and (evaluate.prompts is not None or evaluate.tasks):
        from paceline.cli.run_outputs import make_and_show

        make_and_show(run, view.note)
    report, why_not = _write_report(run) if asked.reports else (None, _LATER)
    view.closing(state, report, why_not)
    if asked.json:
        click.echo(json.dumps(_summary(run, report), indent=2))
    return state.exit_code


def _make_up_outputs(run: "RunFolder", asked: _Asked) -> int:
    """Do what a finished run lacks, as its command was killed."""
    from paceline.cli.run_outputs import make_and_show

    make_and_show(run, partial(click.echo, err=asked.json))
    report, why_not = _write_report(run) if asked.reports else (None, _LATER)
    click.echo(f"report      {report or why_not}", err=asked.json)
    if asked.json:
        click.echo(json.dumps(_summary(run, report), indent=2))
    return 0


def _hand_over(
    place: str,
    job: "Job | Script",
    plan: "Plan | None",
    run: "RunFolder",
    asked: _Asked,
    *,
    is_new: bool,
) -> int:
    """Submit it. A new run that the queue refuses leaves nothing behind."""
    import shutil

    from paceline.errors import PacelineError
    from paceline.launch.handover import hand_over
    from paceline.launch.places import PLACES

    try:
        placement, submission = hand_over(place, job, plan, run, asked.looking.options)
    except PacelineError:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    if asked.json:
        found = {"run": str(run.path), "place": place, "job_id": placement.job_id}
        click.echo(json.dumps(found, indent=2))
        return 0
    click.echo(f"job {placement.job_id} of {PLACES[place].title}")
    click.echo(f"run folder  {run.path}")
    for note in submission.notes:
        click.echo(note)
    for verb in ("status", "logs", "stop"):
        click.echo(f"  paceline {verb} {shlex.quote(str(run.path))}")
    return 0


_LATER = "`paceline report RUN` writes it"
"""Said of a page that was not asked for."""


def _script_of(
    script: Path, arguments: list[str], nproc: int, overrides: tuple[str, ...]
) -> "Script":
    import re
    import sys

    from paceline.spec import make_script

    name = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("._-")[:64] or "script"
    values = {
        "name": name,
        "command": [sys.executable, str(script), *arguments],
        "processes": nproc,
    }
    job = make_script(values, Path.cwd(), overrides)
    return job


def _check_script(job: "Script", place: str) -> None:
    from paceline.errors import JobError
    from paceline.launch.foreign import check_script

    if place != "local":
        raise click.UsageError(f"--on {place} takes jobs of Paceline's own runtime only.")
    JobError.raise_for(check_script(job))


def _run_script(job: "Script", run: "RunFolder", as_json: bool, *, reports: bool) -> int:
    from paceline.cli.script_progress import ScriptView
    from paceline.launch.attached import versions
    from paceline.launch.foreign import run_script
    from paceline.launch.with_engine import check_started
    from paceline.record.run import summarise

    view = ScriptView(job=job, run=run, to_stderr=as_json)
    view.opening()
    state = run_script(job, run, versions=versions(), on_event=view.event)
    if state.outcome != "interrupted":
        check_started(job, run)
    report, why_not = _write_report(run) if reports else (None, _LATER)
    view.closing(state, report, why_not)
    if as_json:
        summary = asdict(summarise(run)) | {"report": str(report) if report else None}
        click.echo(json.dumps(summary, indent=2))
    return state.exit_code


def _write_report(run: "RunFolder") -> tuple[Path | None, str | None]:
    from paceline.cli.report import write_report

    try:
        return write_report(run), None
    except ImportError as error:
        return None, f"{error.name} is not installed: pip install matplotlib Jinja2"
    except OSError as error:
        return None, f"it cannot be written: {error.filename}: {error.strerror}"


def _summary(run: "RunFolder", report: Path | None) -> dict[str, Any]:
    from paceline.record.run import summarise

    return asdict(summarise(run)) | {"report": str(report) if report else None}
