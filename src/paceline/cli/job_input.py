"""Read what a person hands to a verb: a job file, or one of the JSON contracts."""

from collections.abc import Sequence
from pathlib import Path

import click

from paceline.spec import Job, load_job


def read_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """The job in a file of either kind; what a contract left open is said on standard error.

    Raises:
        JobError: Every problem of the file at once.
    """
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
