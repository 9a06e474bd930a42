"""`paceline checkpoint`: list, look into, verify and convert checkpoints."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, json_option
from paceline.report.table import format_table
from paceline.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from paceline.record.checkpoints import Manifest
    from paceline.record.conversion import Form
    from paceline.record.remote import Copy, Remote

_path = click.argument("path", metavar="PATH")


@click.group(invoke_without_command=False)
def command() -> None:
    """List, look into, verify and convert checkpoints.

    PATH is a run's folder, a folder of checkpoints, or one checkpoint; for `ls` and `verify` also a
    place where copies are kept, such as s3://bucket/prefix.

    \b
    Examples:
      paceline checkpoint ls runs/tiny-lm-20261121-101500
      paceline checkpoint inspect runs/tiny-lm-20261121-101500 --tensors
      paceline checkpoint verify runs/*/
      paceline checkpoint convert runs/tiny-lm-20261121-101500 out --to safetensors
    """


@command.command("ls")
@_path
@json_option
def ls(path: str, as_json: bool) -> None:
    """List checkpoints, newest first. No data file is read.

    \b
    Examples:
      paceline checkpoint ls runs/tiny-lm-20261121-101500
      paceline checkpoint ls s3://bucket/runs/tiny-lm --json
    """
    rows = _remote_rows(path) if _is_url(path) else _local_rows(Path(path))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table: list[tuple[str, ...]] = [
        ("CHECKPOINT", "STATE", "SIZE", "HELD-OUT", "RANKS", "LAYOUT", "WRITTEN")
    ]
    table += [_cells(row) for row in rows]
    click.echo(format_table(table))


@command.command("inspect")
@_path
@click.option("--tensors", is_flag=True, help="One line for each tensor.")
@json_option
def inspect(path: str, tensors: bool, as_json: bool) -> None:
    """Show what a checkpoint holds; of a run, the newest. No data file is read.

    \b
    Examples:
      paceline checkpoint inspect runs/tiny-lm-20261121-101500
      paceline checkpoint inspect runs/tiny-lm-20261121-101500/checkpoints/step-00000050 --tensors
    """
    from paceline.errors import CheckpointError, Problem
    from paceline.record.checkpoints import read_manifest
    from paceline.record.find_checkpoints import one_checkpoint_at
    from paceline.record.tensors import read_tensors

    folder = one_checkpoint_at(Path(path))
    manifest = read_manifest(folder)
    if isinstance(manifest, Problem):
        raise CheckpointError(manifest)
    table = _readable(lambda: read_tensors(folder), folder) or {}
    listed = [
        {"name": name, "size": list(each.size), "dtype": each.dtype, "pieces": len(each.pieces)}
        for name, each in sorted(table.items())
    ]
    if as_json:
        facts: dict[str, Any] = {"path": str(folder), **asdict(manifest), "tensors": listed}
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in _facts(folder, manifest).items():
        click.echo(f"{name:<12}{value}")
    model = sum(1 for name in table if name.startswith("model/"))
    if table:
        click.echo(f"{'holds':<12}{model} tensors of the model, {len(table) - model} of the rest")
    if tensors:
        rows = [
            (each["name"], each["dtype"] or "value", "x".join(map(str, each["size"])) or "-")
            for each in listed
        ]
        click.echo(format_table([("TENSOR", "TYPE", "SIZE"), *rows]))


@command.command("verify")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@json_option
def verify(paths: tuple[str, ...], as_json: bool) -> int:
    """Read every byte of checkpoints and compare it with what was written.

    A damaged one names its file and its tensors.

    \b
    Examples:
      paceline checkpoint verify runs/tiny-lm-20261121-101500
      paceline checkpoint verify s3://bucket/runs/tiny-lm

    \b
    Exit codes: 0 all are whole; 1 some are damaged; 5 none is whole; 2 there is nothing at PATH.
    """
    results = []
    for path in paths:
        results += _verified_remote(path) if _is_url(path) else _verified_local(Path(path))
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        for each in results:
            size = format_bytes(each["num_bytes"]) if each["num_bytes"] else "of unknown size"
            click.echo(f"{'whole  ' if each['whole'] else 'DAMAGED'}  {each['path']}  {size}")
            for problem in each["problems"]:
                click.echo(f"  {problem['code']}: {problem['what']}")
    whole = sum(each["whole"] for each in results)
    return 0 if whole == len(results) else (1 if whole else 5)


@command.command("convert")
@_path
@click.argument("out", metavar="OUT", type=PathName(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(["safetensors", "torch", "paceline"]),
    default="paceline",
    show_default=True,
    help="safetensors: a folder as Hugging Face has it. torch: one .pt file. paceline: a "
    "checkpoint in folder OUT.",
)
@click.option(
    "--from",
    "source_form",
    type=click.Choice(["paceline", "safetensors", "torch", "gguf"]),
    default="paceline",
    show_default=True,
    help="What PATH is. torch: a folder with pytorch_model*.bin; nothing in them is run. gguf: one "
    "file, whose weights are written as float32.",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Of a safetensors file; beyond it there are several and an index.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Files of a checkpoint of ours. Any number of ranks reads any number of files.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="With --to safetensors: add a run's adapters to the weights they were trained beside.",
)
@json_option
def convert(
    path: str,
    out: Path,
    form: "Form",
    source_form: "Form",
    max_shard_size: str,
    ranks: int,
    merge: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint in another form into OUT, and prove that it is the same.

    What was written is read again, and the SHA-256 of its state compared with the source's. Weights
    of Hugging Face become step 0, to be put into a new run's checkpoints/ folder.

    \b
    Examples:
      paceline checkpoint convert runs/tiny-lm-20261121-101500 exported --to safetensors
      paceline checkpoint convert runs/my-lora merged --to safetensors --merge
      paceline checkpoint convert runs/tiny-lm-20261121-101500 weights.pt --to torch
      paceline checkpoint convert Qwen2.5-0.5B start --from safetensors
      paceline checkpoint convert old-model new-model --from torch --to safetensors
      paceline checkpoint convert model.Q4_1.gguf model --from gguf --to safetensors
      paceline checkpoint convert runs/tiny-lm-20261121-101500 resharded --ranks 8
    """
    from paceline.errors import JobError, Problem
    from paceline.launch.convert import convert as convert_there
    from paceline.launch.convert import verified_facts, with_known_config
    from paceline.record.conversion import Conversion
    from paceline.record.find_checkpoints import one_checkpoint_at

    try:
        limit = parse_bytes(max_shard_size)
    except ValueError as error:
        raise click.UsageError(f"--max-shard-size: {error}") from None
    if merge and (form, source_form) != ("safetensors", "paceline"):
        raise click.UsageError("--merge is of a run's adapters, and needs --to safetensors")
    facts: dict[str, Any] = {}
    source, step = Path(path), 0
    if source_form == "paceline":
        source = one_checkpoint_at(source)
        step, facts = verified_facts(source)
    elif not source.exists():
        problem = Problem(
            code="C011",
            what=f"there is nothing at {path}",
            where="PATH",
            fix="give a folder with .safetensors files or pytorch_model*.bin, one such file, or a "
            ".gguf file",
        )
        raise JobError(problem)
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise JobError.of(
            code="R002",
            what=f"{out} is there already",
            where="OUT",
            fix="give a new name; nothing is written over",
        )
    asked = Conversion(
        source=str(source.resolve()),
        out=str(out.resolve()),
        source_form=source_form,
        form=form,
        max_shard_bytes=limit,
        ranks=ranks,
        step=step,
        merge=merge,
        facts=facts,
    )
    start = time.perf_counter()
    done = convert_there(with_known_config(asked))
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
        return
    for file in done.files:
        click.echo(f"written   {file}")
    for note in done.notes:
        click.echo(f"note      {note}")
    seconds = time.perf_counter() - start
    click.echo(f"size      {format_bytes(done.num_bytes)}, {done.tensors} values, {seconds:.1f} s")
    click.echo(f"SHA-256   {done.before} before, {done.after} after: the same")


def _is_url(path: str) -> bool:
    return "://" in path


def _local_rows(path: Path) -> list[dict[str, Any]]:
    from paceline.errors import Problem
    from paceline.record.checkpoints import read_manifest
    from paceline.record.find_checkpoints import checkpoints_at

    rows = []
    for folder in checkpoints_at(path):
        manifest = read_manifest(folder)
        if isinstance(manifest, Problem):
            row = {"name": folder.name, "path": str(folder), "state": f"{manifest.code}"}
        else:
            row = _row(folder.name, str(folder), manifest)
        rows.append(row)
    return rows


def _row(name: str, path: str, manifest: "Manifest") -> dict[str, Any]:
    return {
        "name": name,
        "path": path,
        "state": "committed",
        "step": manifest.step,
        "num_bytes": manifest.num_bytes,
        "held_out_loss": manifest.held_out_loss,
        "world_size": manifest.world_size,
        "layout": manifest.layout,
        "created": manifest.created,
    }


def _remote_rows(url: str) -> list[dict[str, Any]]:
    _, copies = _copies_at(url)
    return [
        _row(copy.name, copy.url, copy.manifest)
        if copy.manifest is not None
        else {"name": copy.name, "path": copy.url, "state": "C001"}
        for copy in copies
    ]


def _copies_at(url: str) -> "tuple[Remote, list[Copy]]":
    """The storage, and the copies in it.

    Raises:
        JobError: `R010`, `C014`: it cannot be reached; `C011`: there are none.
    """
    from paceline.errors import JobError
    from paceline.record.remote import Remote

    remote = Remote(url, where="PATH")
    copies = remote.copies()
    if not copies:
        raise JobError.of(
            code="C011",
            what=f"there is no copy of a checkpoint at {url}",
            where="PATH",
            fix="give checkpoint.copy_to with the run's name behind it: s3://bucket/jobs/RUN",
        )
    return remote, copies


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "step" not in row:
        return (row["name"], row["state"], "-", "-", "-", "-", "-")
    loss = row["held_out_loss"]
    return (
        row["name"],
        row["state"],
        format_bytes(row["num_bytes"]),
        "-" if loss is None else f"{loss:.4f}",
        str(row["world_size"]),
        row["layout"] or "-",
        row["created"] or "-",
    )


def _verified_local(path: Path) -> list[dict[str, Any]]:
    from paceline.errors import Problem
    from paceline.record.checkpoints import damaged_in, find_damage, read_manifest
    from paceline.record.find_checkpoints import checkpoints_at

    results = []
    for folder in checkpoints_at(path):
        problems = list(find_damage(folder))
        manifest = read_manifest(folder)
        files = () if isinstance(manifest, Problem) else sorted(manifest.files)
        hit = [file for file in files if any(p.where == str(folder / file) for p in problems)]
        results.append(
            {
                "path": str(folder),
                "whole": not problems,
                "num_bytes": 0 if isinstance(manifest, Problem) else manifest.num_bytes,
                "problems": [asdict(problem) for problem in problems],
                "damaged_tensors": {file: damaged_in(folder, file) for file in hit},
            }
        )
    return results


def _verified_remote(url: str) -> list[dict[str, Any]]:
    remote, copies = _copies_at(url)
    results = []
    for copy in copies:
        problem = remote.verify(copy)
        results.append(
            {
                "path": copy.url,
                "whole": problem is None,
                "num_bytes": 0 if copy.manifest is None else copy.manifest.num_bytes,
                "problems": [] if problem is None else [asdict(problem)],
                "damaged_tensors": {},
            }
        )
    return results


def _readable(read: Any, folder: Path) -> Any:
    import msgspec

    from paceline.errors import CheckpointError, Problem

    try:
        return read()
    except (OSError, msgspec.DecodeError) as error:
        problem = Problem(
            code="C005",
            what=f"tensors.json of {folder.name} cannot be read: {error}",
            where=str(folder),
            fix="paceline checkpoint verify says what else is wrong with it",
        )
        raise CheckpointError(problem) from None


def _facts(folder: Path, manifest: "Manifest") -> dict[str, str]:
    loss, digest = manifest.held_out_loss, manifest.state_digest
    degrees = ", ".join(f"{way} {degree}" for way, degree in manifest.mesh.items())
    facts = {
        "checkpoint": str(folder),
        "step": f"{manifest.step}, written {manifest.created or 'at an unknown time'}",
        "size": f"{format_bytes(manifest.num_bytes)} in {len(manifest.files)} files",
        "layout": f"{manifest.layout or 'unknown'}, written by {manifest.world_size} ranks"
        + (f" ({degrees})" if degrees else ""),
        "data": ""
        if manifest.samples is None
        else f"{manifest.samples} samples consumed, seed {manifest.seed}",
        "held-out": "" if loss is None else f"{loss:.4f}",
        "SHA-256": digest or "",
        "written by": manifest.written_by,
        "form": str(manifest.format),
    }
    return {name: value for name, value in facts.items() if value}
