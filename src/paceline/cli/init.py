"""`paceline init`: a commented job file to start from."""

from importlib.resources import files
from pathlib import Path

import click

from paceline.cli.options import PathName
from paceline.errors import JobError


@click.command()
@click.argument("path", type=PathName(path_type=Path), default=Path("job.yaml"))
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def command(path: Path, force: bool) -> None:
    """Write a commented job file to PATH (job.yaml when left out).

    It trains a small language model on your own text files, on two ranks of this machine.
    `paceline schema` and docs/reference/job-file.md list every field.

    \b
    Examples:
      paceline init
      paceline init my-job.yaml && paceline plan my-job.yaml
    """
    if path.exists() and not force:
        raise JobError.of(
            code="J008",
            what=f"{path} exists",
            where=str(path),
            fix="give another name, or --force to write over it",
        )
    try:
        path.write_bytes((files("paceline") / "templates" / "job.yaml").read_bytes())
    except OSError as error:
        raise JobError.of(
            code="J008",
            what=f"{path} cannot be written: {error.strerror}",
            where=str(path),
            fix="give a file in a folder that exists and that you may write to",
        ) from None
    click.echo(f"wrote {path}; edit data.path, then: paceline plan {path}", err=True)
