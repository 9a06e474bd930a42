"""`paceline run` of another engine, with its own program (JOB) or a person's (--script, --with)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.cli.run_options import Asked
    from paceline.job import Job, Script
    from paceline.launch.engine_run import EngineRun, OwnScript
    from paceline.plan import Plan
    from paceline.record.run import RunFolder


def start_with(
    engine: str,
    script: Path,
    job_file: Path | None,
    arguments: tuple[str, ...],
    overrides: tuple[str, ...],
    asked: "Asked",
) -> int:
    """Plan the ranks of JOB and start your own script on them, by an engine's launcher."""
    from paceline.launch.places import find_place

    place = asked.place or "local"
    find_place(place)
    if asked.alerts is not None:
        raise click.UsageError("--with takes the job's section `alerts`: leave --alerts out.")
    if place == "kubernetes":
        raise click.UsageError("--with does not start on Kubernetes: see kubernetes.script.")
    job, plan, own = plan_with(
        engine, script, job_file, arguments, overrides, place=place, hosts=asked.hosts
    )
    return start_engine(engine, job, plan, own, place, asked)


def start_engine(
    engine: str,
    job: "Job",
    plan: "Plan",
    own: "OwnScript | None",
    place: str,
    asked: "Asked",
) -> int:
    """Another engine's launcher on every node, or the files of it for a dry run."""
    from paceline.launch.places import find_place
    from paceline.record.run import fresh_name

    asked.looking.check(place, is_job=False)
    prepared = prepare(engine, job, plan, place, own)
    if asked.dry_run:
        folder = asked.out or fresh_name(asked.runs, job.spec.name)
        return show(place, prepared, folder, asked.looking.options, as_json=asked.json)
    program, run = create(prepared, asked.out, asked.runs)
    if find_place(place).kind == "queued":
        return asked.submit(place, program, None, run, is_new=True)
    return asked.attend(program, run, place, is_new=True)


def plan_with(
    engine: str,
    script: Path,
    job_file: Path | None,
    arguments: Sequence[str],
    overrides: tuple[str, ...],
    *,
    place: str,
    hosts: str | None,
) -> "tuple[Job, Plan, OwnScript]":
    """The job of `--script --with ENGINE JOB`, its plan, and the script.

    Raises:
        UsageError: No job is named.
        JobError: The script cannot be started there.
    """
    from paceline.cli.job_input import read_job, with_engine
    from paceline.cli.run_job import with_hosts_of
    from paceline.errors import JobError
    from paceline.launch.engine_run import OwnScript, check
    from paceline.launch.plannable import planned
    from paceline.topology.places import at_place

    if job_file is None:
        raise click.UsageError("--with plans the ranks: name a job file as well.")
    job = with_hosts_of(with_engine(read_job(job_file, overrides), engine), hosts, place)
    plan = planned(at_place(job, place))
    own = OwnScript(path=script, arguments=arguments)
    JobError.raise_for(check(engine, job, plan, place=place, own=own))
    return job, plan, own


def prepare(
    engine: str, job: "Job", plan: "Plan", place: str, own: "OwnScript | None"
) -> "EngineRun":
    """What is put into the run's folder; what the files lack is said."""
    from paceline.launch.engine_run import prepare as prepare_run

    prepared = prepare_run(engine, job, plan, place=place, own=own)
    for note in prepared.notes:
        click.echo(note, err=True)
    return prepared


def create(prepared: "EngineRun", out: Path | None, runs: Path) -> "tuple[Script, RunFolder]":
    """A new run's folder with the engine's files."""
    from paceline.record.run import create_engine_run

    return create_engine_run(
        prepared.script, prepared.files, name=prepared.name, folder=out, runs=runs
    )


def show(
    place: str, prepared: "EngineRun", folder: Path, options: Sequence[str], *, as_json: bool
) -> int:
    """What would be written, and submitted or started; asks nobody and makes nothing."""
    from paceline.cli.run_submission import format_starts, starts_of
    from paceline.launch.engine_run import PLAN
    from paceline.launch.handover import FOLDER, format_submission
    from paceline.launch.places import PLACES, queued
    from paceline.record.run import RunFolder

    run = RunFolder(folder.resolve())
    script = prepared.script(run.path)
    found: dict[str, object] = {"place": place, "folder": str(run.path)}
    texts = [
        f"==> {run.path / name} <==\n"
        + (text if name != PLAN else "the plan, as `paceline plan JOB --json` prints it\n")
        for name, text in prepared.files.items()
    ]
    if PLACES[place].kind == "queued":
        submission = queued(place).prepare(script, None, run, options)
        found["files"] = dict(prepared.files) | {
            f"{FOLDER}/{name}": text for name, text in submission.files.items()
        }
        found["command"] = list(submission.command)
        texts.append(format_submission(submission, run))
    else:
        starts = starts_of(script, run, place)
        found |= {"files": dict(prepared.files), "starts": starts}
        texts += format_starts(starts)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo("\n".join(texts))
    return 0
