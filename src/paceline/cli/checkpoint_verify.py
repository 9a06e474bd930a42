"""`paceline checkpoint verify`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.checkpoint_options import (
    KEYED,
    copies_at,
    is_given,
    is_url,
    key_option,
    refuse_key,
)
from paceline.cli.options import json_option
from paceline.cli.screen import show
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.record.external_checkpoints import ForeignCheckpoint

_UNREAD = {"C012", "C015"}
"""Codes of what is not read: another layout or family, and a pickle that would run code."""

_STATES = {True: "whole  ", False: "DAMAGED", None: "UNREAD "}


@click.command("verify")
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
@key_option
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
    """Check that checkpoints are whole: every file, byte and value.

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
      1  some are damaged, or of a layout that is not read
      2  there is nothing at PATH
      5  none is valid
    """
    from paceline.launch.external_checkpoints import find_other

    unused = [name for name in ("expect", "tokens") if is_given(context, name)]
    if unused and prompt is None:
        raise click.UsageError(f"--{unused[0]} needs --infer PROMPT")
    results = []
    for path in paths:
        other = None if is_url(path) else find_other(Path(path))
        if other is not None:
            results.append(_verified_other(other, prompt, expect, tokens, key))
            continue
        refuse_key(key, path)
        if prompt is not None:
            raise click.UsageError(
                f"--infer: {path} is no folder that transformers loads: make one of it, "
                f"paceline export {path} OUT"
            )
        results += _verified_remote(path) if is_url(path) else _verified_local(Path(path))
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        for each in results:
            size = format_bytes(each["num_bytes"]) if each["num_bytes"] else "of unknown size"
            show(f"{_STATES[each['whole']]}  {each['path']}  {size}")
            for problem in (*each["problems"], *each.get("warnings", ())):
                mark = "" if problem in each["problems"] else "warning "
                show(f"  {mark}{problem['code']}: {problem['what']}")
                if "checked" in each:
                    show(f"    where: {problem['where']}\n    fix: {problem['fix']}")
            for name in ("checked", "not checked", "answer"):
                for line in each.get(name.replace(" ", "_"), ()):
                    show(f"  {name}: {line}")
    whole = sum(each["whole"] is True for each in results)
    return 0 if whole == len(results) else (1 if whole else 5)


def _verified_other(
    other: "ForeignCheckpoint", prompt: str | None, expect: str | None, tokens: int, key: str | None
) -> dict[str, Any]:
    from paceline.launch.inspect_external import infer, look

    refuse_key(key if other.source[0] not in KEYED else None, str(other.path))
    found = look(other, key=key, scan=True)
    if prompt is not None and not found.problems:
        found = infer(other, found, prompt, expect, tokens=tokens)
    codes = {problem.code for problem in found.problems}
    return {
        "path": found.path,
        "whole": None if codes and codes <= _UNREAD else not codes,
        "num_bytes": found.num_bytes,
        "problems": [asdict(problem) for problem in found.problems],
        "warnings": [asdict(warning) for warning in found.warnings],
        "damaged_tensors": {},
        "wrote": found.wrote,
        "checked": [*found.checked],
        "not_checked": [*found.skipped],
        "answer": [] if found.answer is None else [found.answer],
    }


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
    remote, copies = copies_at(url)
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
