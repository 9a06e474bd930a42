"""`paceline init`: a job file for what is in a folder, or an example project."""

import shlex
import shutil
from importlib.resources import as_file, files
from pathlib import Path

import click

from paceline.cli.options import PathName
from paceline.cli.screen import say
from paceline.errors import JobError


@click.command()
@click.argument("path", type=PathName(path_type=Path), required=False)
@click.option("--template", metavar="NAME", help="Write an example project to the folder PATH.")
@click.option("--force", is_flag=True, help="Write over files that are there.")
def command(path: Path | None, template: str | None, force: bool) -> None:
    """Write a job file to PATH (job.yaml when left out) for what is in its folder.

    A folder with config.json and safetensors, or a GGUF file, becomes the model that is trained
    further; jsonl, parquet, arrow, csv and txt files become the data; a script that trains is
    started as it is; GPUs of this machine are used. What was found and chosen is printed. Where
    there is nothing, the job trains a small language model on two CPU ranks. `paceline schema`
    lists every field.

    With --template, PATH is a new folder (named like the template when left out) with a job file,
    data and a README, trained in under a minute on two ranks of this machine: sentiment,
    text-gen-lora, trade-classifier, peft-quick, classification-full, domain-adapt, multi-adapter.

    \b
    Examples:
      paceline init
      paceline init my-job.yaml && paceline plan my-job.yaml
      paceline init --template sentiment && paceline run sentiment/job.yaml
    """
    from paceline.cli.init_detect import found_lines, job_for, look_around

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
        found = look_around(path.parent) if template is None else None
        try:
            if template is not None:
                shutil.copytree(templates / template, path, dirs_exist_ok=True)
                shutil.copytree(templates / "tokenizer", path / "tokenizer", dirs_exist_ok=True)
            elif found is not None:
                text = (templates / "job.yaml").read_text(encoding="utf-8")
                path.write_text(job_for(found, text), encoding="utf-8")
        except (OSError, shutil.Error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise JobError.of(
                code="J008",
                what=f"{path} cannot be written: {reason}",
                where=str(path),
                fix="give a name in a folder that exists and that you may write to",
            ) from None
    if found is not None:
        for line in found_lines(found, path.parent):
            say(line)
        edit = f"set {' and '.join(found.to_set)} in it, " if found.to_set else ""
        verb = "run" if found.is_script_alone else "plan"
        say(f"wrote {path}; {edit}then: paceline {verb} {shlex.quote(str(path))}")
    else:
        job = shlex.quote(str(path / "job.yaml"))
        click.echo(f"wrote {path}; read {path}/README.md, then: paceline run {job}", err=True)
