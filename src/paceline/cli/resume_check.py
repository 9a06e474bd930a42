"""`paceline run --resume PATH --check`: can the job resume from there? Starts nothing."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.screen import show

if TYPE_CHECKING:
    from paceline.check.resume import Verdict
    from paceline.job import Job
    from paceline.parallel import Layout
    from paceline.plan import Plan
    from paceline.record.external_checkpoints import ForeignCheckpoint

_CODES = {"compatible": 0, "convertible": 1, "not": 5}


def check_resume(
    path: Path,
    job_file: Path | None,
    overrides: tuple[str, ...],
    *,
    place: str | None,
    hosts: str | None,
    as_json: bool,
) -> int:
    """Print whether a job resumes from a checkpoint, and what to run before if not as it is.

    Args:
        path: A run's folder, a checkpoint of ours, or one of another program.
        job_file: Of the job; None is the run's own.
        overrides: Of the job.
        place: Where it would run; None is here, or where the run was.
        hosts: Of the command line.
        as_json: Print the verdict's fields.

    Raises:
        JobError: There is no checkpoint at all, or the job is wrong.
    """
    verdict = _verdict(path, job_file, overrides, place, hosts)
    if as_json:
        click.echo(json.dumps(asdict(verdict), indent=2))
    else:
        from paceline.report.resume_text import resume_lines

        for line in resume_lines(verdict):
            show(line)
    return _CODES[verdict.fit]


def _verdict(
    path: Path,
    job_file: Path | None,
    overrides: tuple[str, ...],
    place: str | None,
    hosts: str | None,
) -> "Verdict":
    from paceline.record.external_checkpoints import find_foreign
    from paceline.record.find_checkpoints import is_checkpoint, is_ours
    from paceline.record.run import RunFolder

    if RunFolder(path).info_file.exists():
        return _of_run(path, job_file, overrides, place, hosts)
    found = None if is_checkpoint(path) and is_ours(path) else _readable(path, find_foreign)
    if job_file is None:
        raise click.UsageError(
            f"{path} is no run of Paceline's, which has its job in it: name the job too, "
            f"paceline run JOB --resume {path} --check"
        )
    if found is None:
        return _of_ours(path, job_file, overrides)
    return _of_foreign(found, job_file, overrides)


def _of_run(
    path: Path,
    job_file: Path | None,
    overrides: tuple[str, ...],
    place: str | None,
    hosts: str | None,
) -> "Verdict":
    """As the run itself would begin: the newest checkpoint whose every byte is as written."""
    from paceline.check.resume import judge_run
    from paceline.cli.job_input import count_samples_at, read_job
    from paceline.cli.run_job import go_on
    from paceline.errors import PacelineError, Problem
    from paceline.record.checkpoints import newest_valid, read_manifest
    from paceline.record.placement import read_placement
    from paceline.record.run import open_run

    run = open_run(path)
    if run.script() is not None:
        raise click.UsageError(
            f"{path} is of a program that is not Paceline's: only it knows its checkpoints."
        )
    before = read_placement(run.path)
    place = place or (before.place if before is not None else "local")
    newest, refused = newest_valid(run.checkpoints)
    manifest = read_manifest(newest.path) if newest is not None else None
    planned: Layout | PacelineError
    try:
        count = count_samples_at(place)
        other = read_job(job_file, overrides, count=count) if job_file is not None else None
        planned = go_on(run, overrides, place=place, hosts=hosts, other=other)[1].layout
    except PacelineError as error:
        planned = error
    return judge_run(
        str(newest.path if newest is not None else run.checkpoints),
        None if isinstance(manifest, Problem) else manifest,
        planned=planned,
        refused=[problem for _, problem in refused],
    )


def _of_ours(path: Path, job_file: Path, overrides: tuple[str, ...]) -> "Verdict":
    from paceline.check.resume import Fit, judge_ours
    from paceline.errors import CheckpointError, Problem
    from paceline.record.checkpoints import read_manifest
    from paceline.record.find_checkpoints import one_checkpoint_at
    from paceline.record.run import training_digest

    folder = one_checkpoint_at(path)
    manifest = read_manifest(folder)
    if isinstance(manifest, Problem):
        raise CheckpointError(manifest)
    job, plan = _planned(job_file, overrides)
    verdict = judge_ours(manifest, str(folder), layout=plan.layout, digest=training_digest(job))
    if verdict.fit is not Fit.COMPATIBLE:
        return verdict
    start = f"to begin a run with it: paceline run {job_file} --from {folder}"
    return replace(verdict, why=[*verdict.why, start])


def _of_foreign(
    found: "ForeignCheckpoint", job_file: Path, overrides: tuple[str, ...]
) -> "Verdict":
    from paceline.check.resume import judge_foreign
    from paceline.launch.external_checkpoints import damage_in
    from paceline.profile.resolve import written_config

    job, plan = _planned(job_file, overrides)
    return judge_foreign(
        found,
        engine=plan.engine,
        layout=plan.layout,
        job=str(job_file),
        config=written_config(job),
        damage=damage_in(found),
    )


def _planned(job_file: Path, overrides: tuple[str, ...]) -> "tuple[Job, Plan]":
    from paceline.cli.job_input import read_job
    from paceline.launch.plannable import planned

    job = read_job(job_file, overrides)
    return job, planned(job)


def _readable(path: Path, find: Any) -> "ForeignCheckpoint | None":
    from paceline.errors import JobError

    try:
        found: ForeignCheckpoint | None = find(path)
    except OSError as error:
        raise JobError.of(
            code="C011",
            what=f"{error.filename or path} cannot be read: {error.strerror}",
            where="--resume",
            fix="give a folder that you may read",
        ) from None
    return found
