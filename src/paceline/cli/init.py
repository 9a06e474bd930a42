"""`paceline init`: a commented job file to start from, or an example project."""

import shutil
from importlib.resources import as_file, files
from pathlib import Path

import click

from paceline.cli.options import PathName
from paceline.errors import JobError


@click.command()
@click.argument("path", type=PathName(path_type=Path), required=False)
@click.option("--template", metavar="NAME", help="Write an example project to the folder PATH.")
@click.option("--force", is_flag=True, help="Write over files that are there.")
def command(path: Path | None, template: str | None, force: bool) -> None:
    """Write a commented job file to PATH (job.yaml when left out).

    It trains a small language model on your own text files, on two ranks of this machine.
    `paceline schema` and docs/reference/job-file.md list every field.

    With --template, PATH is a new folder (named like the template when left out) with a job file,
    data and a README, trained in under a minute on two ranks of this machine: sentiment,
    text-gen-lora, trade-classifier, peft-quick, classification-full, domain-adapt, multi-adapter.

    \b
    Examples:
      paceline init
      paceline init my-job.yaml && paceline plan my-job.yaml
      paceline init --template sentiment && paceline run sentiment/job.yaml
    """
    path = path or Path(template or "job.yaml")
    with as_file(files("paceline") / "templates") as templates:
        names = sorted(found.parent.name for found in templates.glob("*/job.yaml"))
        if template is not None and template not in names:
            raise JobError.of(
                code="J008",
                what=f"there is no template {template}",
                where="--template",
                fix=f"choose one of {', '.join(names)}",
            )
        if path.exists() and not force:
            raise JobError.of(
                code="J008",
                what=f"{path} exists",
                where=str(path),
                fix="give another name, or --force to write over it",
            )
        try:
            if template is None:
                shutil.copyfile(templates / "job.yaml", path)
            else:
                shutil.copytree(templates / template, path, dirs_exist_ok=True)
                shutil.copytree(templates / "tokenizer", path / "tokenizer", dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise JobError.of(
                code="J008",
                what=f"{path} cannot be written: {reason}",
                where=str(path),
                fix="give a name in a folder that exists and that you may write to",
            ) from None
    if template is None:
        click.echo(f"wrote {path}; edit data.path, then: paceline plan {path}", err=True)
    else:
        click.echo(
            f"wrote {path}; read {path}/README.md, then: paceline run {path}/job.yaml", err=True
        )
