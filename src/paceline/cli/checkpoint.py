"""`paceline checkpoint`: list, look into, verify and convert checkpoints."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from paceline.cli.options import PathName, json_option
from paceline.cli.screen import show
from paceline.report.table import format_table
from paceline.units import counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from paceline.launch.inspect_external import Looked
    from paceline.record.checkpoints import Manifest
    from paceline.record.conversion import Form
    from paceline.record.external_checkpoints import ForeignCheckpoint
    from paceline.record.remote import Copy, Remote

_path = click.argument("path", metavar="PATH")
_key = click.option(
    "--key",
    metavar="NAME",
    help="Where the weights are in a file of torch or a folder of torch.distributed.checkpoint "
    "that has several tables of tensors, such as `ema`.",
)
_FORMS = (*("paceline", "safetensors", "torch", "dcp", "adapter", "deepspeed", "megatron", "gguf"),)
_KEYED = ("torch", "dcp")
"""Forms that --key is of."""


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
        ("CHECKPOINT", "STATE", "SIZE", "EVAL LOSS", "RANKS", "LAYOUT", "WRITTEN")
    ]
    table += [_cells(row) for row in rows]
    show(format_table(table))


@command.command("inspect")
@_path
@click.option("--tensors", is_flag=True, help="One line for each tensor.")
@_key
@json_option
def inspect(path: str, tensors: bool, key: str | None, as_json: bool) -> None:
    """Show what a checkpoint holds: whose it is, layout, types, parameters, memory.

    Of a run or a folder of steps, the newest. No value of a tensor is read.

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
    _refuse_key(key, path)
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


@command.command("verify")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "--infer",
    "prompt",
    metavar="PROMPT",
    help="Also load a Hugging Face model or a peft adapter with transformers, and continue PROMPT.",
)
@click.option("--expect", metavar="TEXT", help="With --infer: what has to be in the answer.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="With --infer: how many to write at most.",
)
@_key
@json_option
@click.pass_context
def verify(
    context: click.Context,
    paths: tuple[str, ...],
    prompt: str | None,
    expect: str | None,
    tokens: int,
    key: str | None,
    as_json: bool,
) -> int:
    """Check checkpoints: all files there, no byte changed, every value a number.

    Paceline's own are compared byte by byte with what was written; a damaged tensor is named. Other
    programs keep no hashes. Of theirs the headers are compared with the files' sizes, the index
    with the files, names and shapes with config.json, the tokenizer with the embedding, an adapter
    with its base, and every value is read.

    \b
    Examples:
      paceline checkpoint verify runs/tiny-lm-20261121-101500
      paceline checkpoint verify s3://bucket/runs/tiny-lm
      paceline checkpoint verify my-adapter
      paceline checkpoint verify Qwen2.5-0.5B --infer "2 + 2 =" --expect 4

    \b
    Exit codes:
      0  all are valid
      1  some are damaged
      2  there is nothing at PATH
      5  none is valid
    """
    from paceline.launch.external_checkpoints import find_other

    unused = [name for name in ("expect", "tokens") if _is_given(context, name)]
    if unused and prompt is None:
        raise click.UsageError(f"--{unused[0]} needs --infer PROMPT")
    results = []
    for path in paths:
        other = None if _is_url(path) else find_other(Path(path))
        if other is not None:
            results.append(_verified_other(other, prompt, expect, tokens, key))
            continue
        _refuse_key(key, path)
        if prompt is not None:
            raise click.UsageError(
                f"--infer: {path} is no folder that transformers loads: make one of it, "
                f"paceline export {path} OUT"
            )
        results += _verified_remote(path) if _is_url(path) else _verified_local(Path(path))
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        for each in results:
            size = format_bytes(each["num_bytes"]) if each["num_bytes"] else "of unknown size"
            show(f"{'whole  ' if each['whole'] else 'DAMAGED'}  {each['path']}  {size}")
            for problem in (*each["problems"], *each.get("warnings", ())):
                mark = "" if problem in each["problems"] else "warning "
                show(f"  {mark}{problem['code']}: {problem['what']}")
                if "checked" in each:
                    show(f"    where: {problem['where']}\n    fix: {problem['fix']}")
            for name in ("checked", "not checked", "answer"):
                for line in each.get(name.replace(" ", "_"), ()):
                    show(f"  {name}: {line}")
    whole = sum(each["whole"] for each in results)
    return 0 if whole == len(results) else (1 if whole else 5)


@command.command("convert")
@_path
@click.argument("out", metavar="OUT", type=PathName(path_type=Path))
@click.option(
    "--to",
    "form",
    type=click.Choice(["safetensors", "torch", "dcp", "deepspeed", "paceline"]),
    default="paceline",
    show_default=True,
    help="safetensors: a folder as Hugging Face has it. torch: one .pt file. dcp: a folder of "
    "torch.distributed.checkpoint. deepspeed: ZeRO's universal form. paceline: a checkpoint in "
    "folder OUT.",
)
@click.option(
    "--from",
    "source_form",
    type=click.Choice(["auto", *_FORMS]),
    default="auto",
    show_default=True,
    help="Format of PATH; auto finds out. torch: .pt, .pth and .bin. "
    "dcp: torch.distributed.checkpoint. adapter: of peft. gguf: one file, whose weights are "
    "written as float32.",
)
@_key
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Largest safetensors file; larger weights go into several files with an index.",
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
    help="With --to safetensors: add the adapters of a run or of peft to the weights they were "
    "trained beside.",
)
@click.option(
    "--weights-only", is_flag=True, help="Leave optimizer state out. safetensors has none anyway."
)
@click.option(
    "--allow-nonfinite",
    is_flag=True,
    help="Also write tensors with NaN or infinite values, which are refused otherwise.",
)
@json_option
@click.pass_context
def convert(
    context: click.Context,
    path: str,
    out: Path,
    form: "Form",
    source_form: "Form | Literal['auto']",
    key: str | None,
    max_shard_size: str,
    ranks: int,
    merge: bool,
    weights_only: bool,
    allow_nonfinite: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint in another form into OUT, and prove that it is the same.

    What was written is read again, and the SHA-256 of its state compared with the source's: over
    names, types, shapes and values, in any order. As forms name tensors in their own ways, that of
    another form differs; `weights` is the SHA-256 without names and optimizer state, which is the
    same along a chain of conversions. OUT appears when it is whole. Optimizer state is carried
    along, of our checkpoints, DeepSpeed's ZeRO and torch.distributed.checkpoint; where it
    cannot be, that is refused by name. With --to paceline another program's checkpoint becomes the
    step that its optimizer counts, 0 for weights alone; `paceline run JOB --from OUT/step-00000000`
    begins with it.

    \b
    Examples:
      paceline checkpoint convert runs/tiny-lm-... exported --to safetensors
      paceline checkpoint convert runs/my-lora merged --to safetensors --merge
      paceline checkpoint convert runs/tiny-lm-... weights.pt --to torch
      paceline checkpoint convert Qwen2.5-0.5B start
      paceline checkpoint convert old-model new-model --to safetensors
      paceline checkpoint convert /ckpt/global_step100 model --to safetensors
      paceline checkpoint convert runs/tiny-lm-... zero --to deepspeed
      paceline checkpoint convert /ckpt/global_step100 start
      paceline checkpoint convert /ckpt/iter_0001000 model --to safetensors
      paceline checkpoint convert my-adapter merged --to safetensors --merge
      paceline checkpoint convert model.Q4_1.gguf model --to safetensors
      paceline checkpoint convert runs/tiny-lm-... resharded --ranks 8
    """
    from paceline.errors import JobError
    from paceline.launch.convert import convert as convert_there
    from paceline.launch.convert import find_source, verified_facts, with_known_config
    from paceline.record.conversion import Conversion

    try:
        limit = parse_bytes(max_shard_size)
    except ValueError as error:
        raise click.UsageError(f"--max-shard-size: {error}") from None
    if not Path(path).exists():
        raise JobError.of(
            code="C011",
            what=f"there is nothing at {path}",
            where="PATH",
            fix="give a run, a checkpoint, or a file or folder of weights",
        )
    found_form, source, optimizer_elsewhere = find_source(
        Path(path), None if source_form == "auto" else source_form
    )
    _refuse_unused(context, found_form)
    step, facts = verified_facts(source) if found_form == "paceline" else (0, {})
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
        source_form=found_form,
        key=key,
        form=form,
        max_shard_bytes=limit,
        ranks=ranks,
        step=step,
        merge=merge,
        facts=facts,
        weights_only=weights_only,
        optimizer_elsewhere=optimizer_elsewhere,
        allow_nonfinite=allow_nonfinite,
    )
    start = time.perf_counter()
    done = convert_there(with_known_config(asked))
    if as_json:
        click.echo(json.dumps(asdict(done), indent=2))
        return
    for file in done.files:
        show(f"written   {file}")
    for note in done.notes:
        show(f"note      {note}")
    seconds = time.perf_counter() - start
    show(f"size      {format_bytes(done.num_bytes)}, {done.tensors} values, {seconds:.1f} s")
    show(f"SHA-256   {done.before} before, {done.after} after: the same")
    show(f"weights   SHA-256 {done.weights}, the same in every format and under other names")


_ONLY = {"max_shard_size": "safetensors", "ranks": "paceline", "merge": "safetensors"}
"""Options of `convert` and the form of OUT that they are of."""


def _refuse_unused(context: click.Context, source_form: str) -> None:
    """
    Raises:
        UsageError: An option of `convert` was given that would have no effect.
    """
    form, path = context.params["form"], context.params["path"]
    for name, needed in _ONLY.items():
        if _is_given(context, name) and form != needed:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --to {needed}")
    if source_form not in _KEYED:
        _refuse_key(context.params["key"], path)
    if context.params["merge"] and source_form not in ("paceline", "adapter"):
        raise click.UsageError(f"--merge is of adapters of a run or of peft, and {path} has none")
    if source_form == "adapter" and form == "paceline":
        raise click.UsageError(
            "an adapter is no whole model: name it in the job, train.adapter.start, or give "
            "--to safetensors --merge"
        )


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _refuse_key(key: str | None, path: str) -> None:
    if key is not None:
        raise click.UsageError(
            f"--key is of files of torch and torch.distributed.checkpoint, which {path} is not"
        )


def _show_other(
    other: "ForeignCheckpoint", key: str | None, *, tensors: bool, as_json: bool
) -> None:
    """
    Raises:
        CheckpointError: It is damaged.
    """
    from paceline.errors import CheckpointError
    from paceline.launch.inspect_external import look

    _refuse_key(key if other.source[0] not in _KEYED else None, str(other.path))
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


def _verified_other(
    other: "ForeignCheckpoint", prompt: str | None, expect: str | None, tokens: int, key: str | None
) -> dict[str, Any]:
    from paceline.launch.inspect_external import infer, look

    _refuse_key(key if other.source[0] not in _KEYED else None, str(other.path))
    found = look(other, key=key, scan=True)
    if prompt is not None and not found.problems:
        found = infer(other, found, prompt, expect, tokens=tokens)
    return {
        "path": found.path,
        "whole": not found.problems,
        "num_bytes": found.num_bytes,
        "problems": [asdict(problem) for problem in found.problems],
        "warnings": [asdict(warning) for warning in found.warnings],
        "damaged_tensors": {},
        "wrote": found.wrote,
        "checked": [*found.checked],
        "not_checked": [*found.skipped],
        "answer": [] if found.answer is None else [found.answer],
    }


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
