"""`paceline export`: a run's model as a folder that other programs load, with a program that serves
it where that is asked for; or the registry of runs as SQL."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, is_given, json_option
from paceline.errors import JobError
from paceline.units import counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from paceline.launch.export import Export, Exported
    from paceline.prepare import TrainedOn
    from paceline.record.conversion import DType


@click.command()
@click.argument("run_folder", metavar="RUN", type=PathName(path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=PathName(path_type=Path))
@click.option(
    "--step",
    type=click.IntRange(min=1),
    help="Export the checkpoint of this step.  [default: the newest]",
)
@click.option("--best", is_flag=True, help="Export the checkpoint with the lowest evaluation loss.")
@click.option(
    "--merge",
    is_flag=True,
    help="Add adapters to the weights they were trained beside: a whole model, without peft.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the weights.  [default: that of model.pretrained, else float32; adapters and "
    "merged weights keep theirs]",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Largest file of weights; beyond it there are several and an index.",
)
@click.option(
    "--for",
    "target",
    type=click.Choice(["fastapi", "sql"]),
    help="fastapi: a program beside the weights that answers HTTP requests. sql: RUN is the folder "
    "of all runs, and OUT the file of their registry, standard output unless given.",
)
@click.option("--no-check", is_flag=True, help="Do not load the folder and compare its logits.")
@json_option
def command(
    run_folder: Path,
    out: Path | None,
    step: int | None,
    best: bool,
    merge: bool,
    dtype: "DType | None",
    max_shard_size: str,
    target: str | None,
    no_check: bool,
    as_json: bool,
) -> None:
    """Export the model of the run in folder RUN to the new folder OUT, for transformers or peft.

    OUT has the weights, config.json, the tokenizer with its chat template, the settings of
    generation, and a model card (README.md). It is RUN/export-step-N unless it is given. A run of
    adapters gives adapters, or a whole model with --merge.

    The folder is then loaded by transformers, and its logits of eight samples are compared with
    those of the run's own model.

    With --for fastapi OUT also gets serve.py, model.py and requirements.txt: `uvicorn serve:app` in
    OUT answers GET /health, POST /predict and POST /predict/batch (at most 100 inputs). RUN may
    then be an exported or other Hugging Face folder too, which gets the three files.

    With --for sql the runs in folder RUN become tables that sqlite3 and PostgreSQL load: runs,
    run_settings, run_packages, run_metrics and run_checkpoints. Loading a newer file again replaces
    the rows of its runs.

    \b
    Examples:
      paceline export runs/tiny-lm-20261121-101500
      paceline export runs/tiny-lm-... exported --best --dtype bfloat16
      paceline export runs/my-lora merged --merge
      paceline export runs/my-lora --step 200 --json
      paceline export runs/my-lora endpoint --merge --for fastapi
      paceline export exported --for fastapi
      paceline export runs registry.sql --for sql
      paceline export runs --for sql | psql mydatabase

    \b
    Exit codes:
      0  exported
      2  cannot be exported; nothing was written
      5  the checkpoint is damaged, or the files written are not the run's model
         (they were removed)
    """
    from paceline.cli.job_input import convert_weights
    from paceline.launch.export import export, plan_export
    from paceline.record.find_checkpoints import checkpoint_of_run
    from paceline.record.run import open_run

    if target == "sql":
        _refuse_options("with --for sql no weights are written")
        _write_registry(run_folder, out, as_json=as_json)
        return
    if target == "fastapi" and _is_exported(run_folder):
        _refuse_options(f"{run_folder} is exported already, and no weights are written")
        _add_endpoint(run_folder, out, as_json=as_json)
        return
    if step is not None and best:
        raise click.UsageError("--step and --best name two checkpoints; give one of them")
    try:
        limit = parse_bytes(max_shard_size)
    except ValueError as error:
        raise click.UsageError(f"--max-shard-size: {error}") from None
    run = open_run(run_folder)
    if run.script() is None:
        convert_weights(run.job())
    checkpoint = checkpoint_of_run(run.path, step=step, best=best)
    suffix = "-merged" if merge else ""
    asked = plan_export(
        run,
        checkpoint,
        out or run_folder / f"export-{checkpoint.name}{suffix}",
        merge=merge,
        dtype=dtype,
        max_shard_bytes=limit,
        endpoint=target == "fastapi",
    )
    done = export(asked, lambda exported: _card(asked, exported), check=not no_check)
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2, default=str))
    else:
        _show(asked, done)


def _refuse_options(why: str) -> None:
    for name in ("step", "best", "merge", "dtype", "max_shard_size", "no_check"):
        if is_given(name):
            raise click.UsageError(f"{why}: leave out --{name.replace('_', '-')}")


def _is_exported(folder: Path) -> bool:
    written = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    return written and not (folder / "run.json").exists()


def _add_endpoint(folder: Path, out: Path | None, *, as_json: bool) -> None:
    from paceline.launch.export import write_endpoint

    if out is not None:
        raise click.UsageError("the endpoint is written beside the weights: leave out OUT")
    files = write_endpoint(folder)
    if as_json:
        click.echo(json.dumps({"folder": str(folder), "files": [str(path) for path in files]}))
        return
    click.echo(f"written   {', '.join(path.name for path in files)} in {folder}")
    _say_how(folder)


def _say_how(folder: Path) -> None:
    click.echo(
        f"serve     cd {shlex.quote(str(folder))} && pip install -r requirements.txt && "
        "uvicorn serve:app --host 127.0.0.1 --port 8000"
    )


def _write_registry(runs: Path, out: Path | None, *, as_json: bool) -> None:
    from paceline.launch.convert import unfinished
    from paceline.record.sql import registry_sql

    if not runs.is_dir() or (runs / "run.json").exists():
        one = "is one run" if runs.is_dir() else "is no folder"
        raise JobError.of(
            code="R003",
            what=f"{runs} {one}, and the registry is of all runs in a folder",
            where="RUN",
            fix=f"give the folder of all runs: paceline export {runs.parent} --for sql"
            if runs.is_dir()
            else "give the folder of all runs, such as runs",
        )
    listing, statements = registry_sql(runs)
    if listing.note is not None:
        click.echo(f"note: {listing.note}", err=True)
    if not listing.rows:
        raise JobError.of(
            code="R003",
            what=f"there is no run in {runs}",
            where="RUN",
            fix="give the folder of all runs, such as runs",
        )
    if out is None:
        if as_json:
            raise click.UsageError("--json describes a file that was written: give OUT")
        for text in statements:
            click.echo(text, nl=False)
        return
    if out.exists():
        raise JobError.of(
            code="R002",
            what=f"{out} is there already",
            where="OUT",
            fix="give a new name; nothing is overwritten",
        )
    with unfinished(out) as path, path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(statements)
    size = out.stat().st_size
    if as_json:
        told = {"file": str(out), "runs": len(listing.rows), "num_bytes": size}
        click.echo(json.dumps(told, indent=2))
        return
    click.echo(
        f"written   {out}: {counted(len(listing.rows), 'run')}, {format_bytes(size)}\n"
        f"load      sqlite3 runs.db < {out}    or    psql -v ON_ERROR_STOP=1 -f {out} DATABASE"
    )


def _card(asked: "Export", exported: "Exported") -> str:
    from paceline.record.gather import gather
    from paceline.report.model_card import model_card

    return model_card(exported, gather(asked.run), asked.run.info(), _data(asked), asked.pretrained)


def _data(asked: "Export") -> "TrainedOn | None":
    """What the run trained on; None where it is not there any more, or has changed."""
    from paceline.job.data_rules import is_prepared
    from paceline.prepare import Prepared, find_data, find_prepared

    data: TrainedOn | None = None
    try:
        if not is_prepared(asked.job):
            data = find_data(asked.job)
        elif (folder := find_prepared(asked.job)) is not None:
            data = Prepared(folder)
    except JobError:
        return None
    began = asked.run.info().data_fingerprint
    return data if data is None or began in (None, data.fingerprint) else None


def _show(asked: "Export", done: "Exported") -> None:
    from paceline.report.model_card import check_text

    kinds = {"model": "the model", "adapters": "adapters alone", "merged": "adapters merged"}
    dtype = f", {done.dtype}" if done.dtype else ""
    converted = done.converted
    click.echo(f"exported  {done.folder}")
    click.echo(f"holds     {kinds[done.kind]} of step {done.step}{dtype}")
    click.echo(
        f"size      {format_bytes(converted.num_bytes)}, {counted(converted.tensors, 'tensor')}, "
        f"{counted(len(converted.files), 'file')}"
    )
    click.echo(f"check     {check_text(done.check)}")
    for note in converted.notes:
        click.echo(f"note      {note}")
    licence = "to be filled in" if done.licence is None else f"{done.licence}, of the base model"
    click.echo(f"card      {done.folder / 'README.md'}; licence {licence}")
    if asked.endpoint:
        _say_how(done.folder)
