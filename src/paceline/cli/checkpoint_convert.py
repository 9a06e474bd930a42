"""`paceline checkpoint convert`."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from paceline.cli.checkpoint_options import KEYED, is_given, key_option, path_argument, refuse_key
from paceline.cli.options import PathName, json_option
from paceline.cli.screen import show
from paceline.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from paceline.record.conversion import Form

_FORMS = (*("paceline", "safetensors", "torch", "dcp", "adapter", "deepspeed", "megatron", "gguf"),)


@click.command("convert")
@path_argument
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
@key_option
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
    help="Files of a Paceline checkpoint; any number of ranks reads any number of files.",
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
    """Write a checkpoint in another form, and check that it is equal.

    What was written is read again, and the SHA-256 of its state compared with the source's: over
    names, types, shapes and values, in any order. Each form names tensors in its own way, so this
    SHA-256 changes with the form; `weights`, the SHA-256 without names and optimizer state, stays
    the same along a chain of conversions. OUT appears when it is whole. Optimizer state is
    converted from Paceline's own checkpoints, DeepSpeed's ZeRO and torch.distributed.checkpoint;
    where it cannot be, the conversion is refused. With --to paceline another program's checkpoint
    becomes the step that its optimizer counts, 0 for weights alone; `paceline run JOB --from
    OUT/step-00000000` begins with it.

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
            where=path,
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
        if is_given(context, name) and form != needed:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --to {needed}")
    if source_form not in KEYED:
        refuse_key(context.params["key"], path)
    if context.params["merge"] and source_form not in ("paceline", "adapter"):
        raise click.UsageError(f"--merge is of adapters of a run or of peft, and {path} has none")
    if source_form == "adapter" and form == "paceline":
        raise click.UsageError(
            "an adapter is no whole model: name it in the job, train.adapter.start, or give "
            "--to safetensors --merge"
        )
