"""`paceline checkpoint`: list, look into, verify and convert checkpoints."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.checkpoint_convert import convert
from paceline.cli.checkpoint_options import (
    KEYED,
    copies_at,
    is_url,
    key_option,
    path_argument,
    refuse_key,
)
from paceline.cli.checkpoint_verify import verify
from paceline.cli.options import json_option
from paceline.cli.screen import show
from paceline.report.table import format_table
from paceline.units import counted, format_bytes

if TYPE_CHECKING:
    from paceline.launch.inspect_external import Looked
    from paceline.record.checkpoints import Manifest
    from paceline.record.external_checkpoints import ForeignCheckpoint


@click.group(invoke_without_command=False)
def command() -> None:
    """List, inspect, verify and convert checkpoints, of Paceline and of others.

    PATH is a run's folder, a folder of checkpoints, or one checkpoint; for `ls` and `verify` also a
    place where copies are kept, such as s3://bucket/prefix. `inspect`, `verify` and `convert` also
    take what other programs write: a Hugging Face model, a peft adapter, a .pt, .pth, .bin or
    .safetensors file, a folder of torch.distributed.checkpoint, DeepSpeed, Megatron-LM, Accelerate
    or Trainer. Pickles are read without running anything in them.

    \b
    Examples:
      paceline checkpoint ls runs/tiny-lm-20261121-101500
      paceline checkpoint inspect runs/tiny-lm-20261121-101500 --tensors
      paceline checkpoint verify runs/*/
      paceline checkpoint convert runs/tiny-lm-... out --to safetensors
      paceline checkpoint verify Qwen2.5-0.5B --infer "2 + 2 =" --expect 4
    """


command.add_command(verify)
command.add_command(convert)


@command.command("ls")
@path_argument
@json_option
def ls(path: str, as_json: bool) -> None:
    """List checkpoints, newest first. No data file is read.

    \b
    Examples:
      paceline checkpoint ls runs/tiny-lm-20261121-101500
      paceline checkpoint ls s3://bucket/runs/tiny-lm --json
    """
    rows = _remote_rows(path) if is_url(path) else _local_rows(Path(path))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table: list[tuple[str, ...]] = [
        ("CHECKPOINT", "STATE", "SIZE", "EVAL LOSS", "RANKS", "WRITTEN", "LAYOUT")
    ]
    table += [_cells(row) for row in rows]
    show(format_table(table, keep=4))


@command.command("inspect")
@path_argument
@click.option("--tensors", is_flag=True, help="One line for each tensor.")
@key_option
@json_option
def inspect(path: str, tensors: bool, key: str | None, as_json: bool) -> None:
    """Show what a checkpoint holds: layout, types, parameters, memory.

    Of a run or a folder of steps the newest is shown. No value of a tensor is read.

    \b
    Examples:
      paceline checkpoint inspect runs/tiny-lm-20261121-101500
      paceline checkpoint inspect runs/tiny-lm-... --tensors
      paceline checkpoint inspect /ckpt/global_step100
    """
    from paceline.errors import CheckpointError, Problem
    from paceline.launch.external_checkpoints import find_other
    from paceline.record.checkpoints import read_manifest
    from paceline.record.find_checkpoints import one_checkpoint_at
    from paceline.record.tensors import read_tensors

    other = find_other(Path(path))
    if other is not None:
        _show_other(other, key, tensors=tensors, as_json=as_json)
        return
    refuse_key(key, path)
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
        show(f"{name:<12}{value}")
    model = sum(1 for name in table if name.startswith("model/"))
    if table:
        show(f"{'holds':<12}{model} tensors of the model, {len(table) - model} others (optimizer)")
    if tensors:
        _list_tensors((name, each.dtype, each.size) for name, each in sorted(table.items()))


def _show_other(
    other: "ForeignCheckpoint", key: str | None, *, tensors: bool, as_json: bool
) -> None:
    """
    Raises:
        CheckpointError: It is damaged.
    """
    from paceline.errors import CheckpointError
    from paceline.launch.inspect_external import look

    refuse_key(key if other.source[0] not in KEYED else None, str(other.path))
    found = look(other, key=key)
    if found.problems:
        raise CheckpointError(*found.problems)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    for name, value in _other_facts(found).items():
        show(f"{name:<12}{value}")
    if tensors:
        _list_tensors((each.name, each.dtype, each.shape) for each in found.tensors)


def _other_facts(found: "Looked") -> dict[str, str]:
    types = ", ".join(f"{size:,} {dtype}" for dtype, size in found.dtypes.items())
    training = f"{format_bytes(found.train_bytes)} with AdamW (16 bytes a parameter), without"
    facts = {
        "checkpoint": found.path,
        "written by": found.wrote,
        "model": found.model or "",
        "adapter of": found.base or "",
        "holds": f"{len(found.tensors)} tensors, {found.num_params:,} parameters: {types}",
        "memory": f"{format_bytes(found.num_bytes)} to load",
        "to train": f"{training} activations" if found.base is None else "",
        "optimizer": found.optimizer,
        "tokenizer": "there is one" if found.tokenizer else "none",
        "note": "; ".join(found.notes),
    }
    return {name: value for name, value in facts.items() if value}


def _list_tensors(rows: Iterable[tuple[str, str, Sequence[int]]]) -> None:
    shown = [
        (name, dtype or "value", "x".join(map(str, size)) or "-") for name, dtype, size in rows
    ]
    show(format_table([("TENSOR", "TYPE", "SIZE"), *shown]))


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
    _, copies = copies_at(url)
    return [
        _row(copy.name, copy.url, copy.manifest)
        if copy.manifest is not None
        else {"name": copy.name, "path": copy.url, "state": "C001"}
        for copy in copies
    ]


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
        (row["created"] or "-")[:16].replace("T", " "),
        row["layout"] or "-",
    )


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
        "layout": f"{manifest.layout or 'unknown'}, written by "
        f"{counted(manifest.world_size, 'rank')}" + (f" ({degrees})" if degrees else ""),
        "data": ""
        if manifest.samples is None
        else f"{manifest.samples} samples consumed, seed {manifest.seed}",
        "eval loss": "" if loss is None else f"{loss:.4f}",
        "SHA-256": digest or "",
        "written by": manifest.written_by,
        "form": str(manifest.format),
    }
    return {name: value for name, value in facts.items() if value}
