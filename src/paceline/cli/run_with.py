"""`paceline run --script PROGRAM --with ENGINE JOB`: what is made of the command line."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.job import Script
    from paceline.record.run import RunFolder


def prepare_with(
    engine: str,
    script: Path,
    job_file: Path | None,
    arguments: tuple[str, ...],
    overrides: tuple[str, ...],
    *,
    out: Path | None,
    runs: Path,
) -> "tuple[Script, RunFolder]":
    """The script under an engine's launcher, on the ranks that are planned for the job."""
    from paceline.cli.job_input import convert_weights, count_samples_at
    from paceline.job import load_job
    from paceline.launch.factory import measure_factory
    from paceline.launch.with_engine import prepare
    from paceline.plan import plan_job

    if job_file is None:
        raise click.UsageError("--with plans the ranks: name a job file as well.")
    job = load_job(job_file, overrides, count=count_samples_at("local"))
    convert_weights(job)
    return prepare(
        engine, job, plan_job(job, measure_factory(job)), script, arguments, folder=out, runs=runs
    )
