"""Read what a person hands to a verb: a job file, or one of the JSON contracts."""

from collections.abc import Sequence
from pathlib import Path

import click

from paceline.spec import Job, load_job


def read_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in a file of either kind; what a contract left open is said on standard error. A
    GGUF file that its model starts from is converted, once.

    Raises:
        JobError: Every problem of the file at once.
    """
    job = _read(path, overrides)
    convert_weights(job)
    return job


def convert_weights(job: Job) -> None:
    """Convert the GGUF file that the job's model starts from, where it has one.

    Raises:
        JobError: It cannot be converted.
    """
    if job.spec.model.pretrained is not None:
        from paceline.launch.gguf import convert_gguf

        convert_gguf(job, lambda line: click.echo(line, err=True))


def _read(path: Path, overrides: Sequence[str]) -> Job:
    if path.suffix.lower() == ".json":
        from paceline.spec.contracts import load_contract

        contract = load_contract(path, overrides)
        if contract is not None:
            for note in contract.notes:
                click.echo(f"note: {note}", err=True)
            for finding in contract.findings:
                click.echo(str(finding), err=True)
            return contract.job
    return load_job(path, overrides)
