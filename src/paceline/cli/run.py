"""`paceline run`: plan, start, watch, recover, report."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option, runs_option, set_option

if TYPE_CHECKING:
    from paceline.plan import Plan
    from paceline.record.run import RunFolder
    from paceline.spec import Job, Script
    from paceline.spec.corpus import Corpus


@click.command()
@click.argument("job_file", metavar="JOB", required=False, type=click.Path(path_type=Path))
@click.argument("arguments", metavar="", required=False, nargs=-1)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    help="Start this Python script, which need not know Paceline, instead of a job; its arguments "
    "follow `--`.",
)
@click.option(
    "--nproc", type=click.IntRange(min=1), help="With --script: how many processes. [default: 1]"
)
@click.option(
    "--resume",
    "resume",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Go on with the run in this folder, from its newest valid checkpoint.",
)
@click.option(
    "--out",
    "out",
    type=click.Path(path_type=Path),
    help="Folder of the new run. [default: RUNS/NAME-DATE-TIME]",
)
@click.option(
    "--report/--no-report",
    "reports",
    default=True,
    show_default=True,
    help="Write the run's page at its end; `paceline report RUN` writes it at any time.",
)
@runs_option
@set_option
@json_option
def command(
    job_file: Path | None,
    arguments: tuple[str, ...],
    script: Path | None,
    nproc: int | None,
    resume: Path | None,
    out: Path | None,
    reports: bool,
    runs: Path,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Train the job in JOB on this machine: plan, start, watch, recover, report.

    Ctrl-C stops the workers at the next step boundary and saves a checkpoint; press it twice to
    stop at once. Everything is kept in the run's folder.

    \b
    Examples:
      paceline run job.yaml
      paceline run job.yaml --set train.steps=50 --out /tmp/try
      paceline run --resume runs/my-job-20261121-101500
      paceline run --resume runs/my-job-... --set cluster.per_node=1
      paceline run --script train.py --nproc 4 -- --lr 0.1
    """
    from paceline.cli.progress import ProgressView
    from paceline.launch.local import run_local
    from paceline.record.run import create_script_run

    if script is not None:
        if resume is not None:
            raise click.UsageError("--resume goes on with a run as it is; leave --script out.")
        given = [str(job_file), *arguments] if job_file is not None else []
        program = _script_of(script, given, nproc or 1, overrides)
        run = create_script_run(program, folder=out, runs=runs)
        return _run_script(program, run, as_json, reports=reports)
    if nproc is not None:
        raise click.UsageError("--nproc goes with --script.")
    if arguments:
        raise click.UsageError(f"Got unexpected extra argument ({arguments[0]})")
    if (job_file is None) == (resume is None):
        raise click.UsageError("Give a job file, or --resume with a run's folder.")
    if resume is not None and out is not None:
        raise click.UsageError("--out is for new runs; --resume goes on in the run's own folder.")
    started = _script_job(job_file, resume, out, runs, overrides)
    if started is not None:
        return _run_script(*started, as_json, reports=reports)
    if resume is not None:
        run, job, plan = _again(resume, overrides)
    else:
        assert job_file is not None
        run, job, plan = _anew(job_file, overrides, out, runs)
    view = ProgressView(job=job, run=run, plan=plan, to_stderr=as_json)
    view.opening(resumed=resume is not None)
    state = run_local(
        job, plan, run, on_event=view.event, on_progress=view.progress, on_note=view.note
    )
    report, why_not = _write_report(run) if reports else (None, _LATER)
    view.closing(state, report, why_not)
    if as_json:
        click.echo(json.dumps(_summary(run, report), indent=2))
    return state.exit_code


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
    _check_script(job)
    return job


def _script_job(
    job_file: Path | None,
    resume: Path | None,
    out: Path | None,
    runs: Path,
    overrides: tuple[str, ...],
) -> "tuple[Script, RunFolder] | None":
    """The job and its run, where it is a program that is not one of ours; otherwise None."""
    from paceline.errors import JobError, Problem
    from paceline.record.run import create_script_run, open_run
    from paceline.spec import load_script

    if resume is not None:
        run = open_run(resume)
        again = run.script()
        if again is None:
            return None
        if overrides:
            raise JobError(
                Problem(
                    code="R051",
                    what="a program's run goes on as it was started",
                    where="--set",
                    fix="leave --set out, or start a new run",
                )
            )
        _check_script(again)
        return again, run
    assert job_file is not None
    job = load_script(job_file, overrides)
    if job is None:
        return None
    _check_script(job)
    return job, create_script_run(job, folder=out, runs=runs)


def _check_script(job: "Script") -> None:
    from paceline.errors import JobError
    from paceline.launch.foreign import check_script

    problems = list(check_script(job))
    if problems:
        raise JobError(*problems)


def _run_script(job: "Script", run: "RunFolder", as_json: bool, *, reports: bool) -> int:
    from paceline.cli.script_progress import ScriptView
    from paceline.launch.foreign import run_script
    from paceline.launch.local import versions
    from paceline.record.run import summarise

    view = ScriptView(job=job, run=run, to_stderr=as_json)
    view.opening()
    state = run_script(job, run, versions=versions(), on_event=view.event)
    report, why_not = _write_report(run) if reports else (None, _LATER)
    view.closing(state, report, why_not)
    if as_json:
        summary = asdict(summarise(run)) | {"report": str(report) if report else None}
        click.echo(json.dumps(summary, indent=2))
    return state.exit_code


def _anew(
    job_file: Path, overrides: tuple[str, ...], out: Path | None, runs: Path
) -> "tuple[RunFolder, Job, Plan]":
    from paceline.record.run import create_run
    from paceline.spec import load_job

    job = load_job(job_file, overrides)
    corpus = _find_corpus(job)
    plan = _check_and_plan(job)
    return create_run(job, plan, folder=out, runs=runs, corpus=corpus), job, plan


def _again(folder: Path, overrides: tuple[str, ...]) -> "tuple[RunFolder, Job, Plan]":
    from paceline.launch.local import can_take_over
    from paceline.record.run import (
        check_same_data,
        check_same_training,
        check_steps_left,
        open_run,
    )
    from paceline.spec import load_job

    run = open_run(folder)
    before = run.job()
    corpus = _find_corpus(before)
    if corpus is not None:
        check_same_data(run, corpus)
    if not overrides:
        if not can_take_over(run):  # if it can be, what it lacks is its end
            check_steps_left(run, before)
        plan = _plan_of(run, before)
        _check(before, plan)
        return run, before, plan
    job = replace(load_job(run.job_file, overrides), folder=before.folder)
    check_same_training(before, job)
    check_steps_left(run, job)
    return run, job, _check_and_plan(job)


def _plan_of(run: "RunFolder", job: "Job") -> "Plan":
    """The plan of before; when its file is lost, a new one from the same job."""
    from paceline.errors import JobError

    try:
        return run.plan()
    except JobError as damaged:
        click.echo(f"{damaged.problems[0].what}; planning again", err=True)
        return _check_and_plan(job)


def _find_corpus(job: "Job") -> "Corpus | None":
    from paceline.spec.corpus import find_corpus

    asked = job.spec.data.path is not None or job.spec.data.corpus is not None
    return find_corpus(job) if asked else None


def _check_and_plan(job: "Job") -> "Plan":
    from paceline.launch.factory import measure_factory
    from paceline.plan import plan_job

    facts = measure_factory(job) if job.spec.model.factory is not None else None
    plan = plan_job(job, facts)
    _check(job, plan)
    return plan


def _check(job: "Job", plan: "Plan") -> None:
    """Everything that can be known to fail before anything is written or started."""
    from paceline.errors import JobError
    from paceline.launch.local import check_can_run

    problems = list(check_can_run(job, plan))
    if problems:
        raise JobError(*problems)


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
