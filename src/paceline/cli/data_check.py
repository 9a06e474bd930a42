"""`paceline data check`: what is in data files, and whether it is fit to train on."""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from paceline.cli.options import FiniteRange, PathName, json_option, set_option
from paceline.cli.output_file import check_can_write
from paceline.cli.screen import Screen, say, show
from paceline.errors import JobError, did_you_mean
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.prepare import Step
    from paceline.prepare.survey import Asked


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=PathName())
@click.option(
    "--job",
    "job_file",
    type=PathName(path_type=Path),
    help="Check this job's data, as the job reads them, instead of PATH.",
)
@set_option
@click.option(
    "--eval",
    "evals",
    multiple=True,
    metavar="PATH",
    type=PathName(),
    help="Look for leakage from PATH. Left out, files of a folder named eval, val, dev or test.",
)
@click.option("--schema", type=PathName(path_type=Path), help="JSON Schema of a row, JSON or YAML.")
@click.option("--columns", metavar="A,B", help="Columns that are compared. Left out, the texts.")
@click.option("--label", metavar="COLUMN", help="Column of the classes. Left out, label or labels.")
@click.option("--tokenizer", type=PathName(), help="Folder with tokenizer.json, or bytes.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Tokens of a sample.")
@click.option(
    "--near",
    type=FiniteRange(min=0, max=1),
    default=0.8,
    show_default=True,
    help="Jaccard similarity of near duplicates; 0 does not look for them.",
)
@click.option(
    "--quality-report",
    type=PathName(path_type=Path),
    help="JSON of Great Expectations, Soda, pandera or whylogs; its checks count too.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="CHECK=SHARE",
    help="Share of rows above which a check is an error: near-duplicates=5%. May be given again.",
)
@click.option("--html", type=PathName(path_type=Path), help="Write a page with the result.")
@click.option("--keep/--no-keep", default=True, help="Keep the result for plan and preflight.")
@json_option
def check(
    paths: tuple[str, ...],
    job_file: Path | None,
    overrides: tuple[str, ...],
    evals: tuple[str, ...],
    schema: Path | None,
    columns: str | None,
    label: str | None,
    tokenizer: str | None,
    seq_len: int | None,
    near: float,
    quality_report: Path | None,
    limits: tuple[str, ...],
    html: Path | None,
    keep: bool,
    as_json: bool,
) -> int:
    """Check data files before training.

    It looks at schema, nulls, duplicates, lengths, classes, leakage, secrets and quality, in jsonl,
    json, csv, tsv, parquet, arrow, text and token files, also .gz and .zst, a folder of them, or a
    job's data. Ends with 1 where a check fails and with 2 where an input is wrong. `paceline
    explain data-leakage` explains a finding.

    \b
    Examples:
      paceline data check chats.jsonl
      paceline data check data/ --eval eval.jsonl --schema row.json
      paceline data check --job job.yaml --html data.html
      paceline data check rows.csv --columns text --label class --limit nulls=1%
      paceline data check corpus/ --tokenizer ./tokenizer --seq-len 2048 --json
      paceline data check rows.parquet --quality-report gx_result.json
    """
    from paceline.check.data import judge_data
    from paceline.prepare.checked import keep_checked
    from paceline.prepare.quality_report import read_quality_report
    from paceline.prepare.schema import read_schema
    from paceline.prepare.survey import size_of, survey

    own_limits = _limits(limits)
    if bool(paths) == (job_file is not None):
        raise click.UsageError("Give PATH or --job, one of them.")
    if job_file is None and overrides:
        raise click.UsageError("--set goes with --job.")
    for path in paths:
        if path.endswith((".yaml", ".yml")):
            raise click.UsageError(f"{path} is no data file. Check a job's data with --job {path}.")
    check_can_write(html, "--html")
    options = {
        "schema": read_schema(schema) if schema is not None else None,
        "columns": tuple(name for name in (columns or "").split(",") if name),
        "label": label,
        "near": near or None,
    }
    quality = read_quality_report(quality_report) if quality_report is not None else None
    scene = (
        _of_paths(paths, evals, tokenizer, seq_len, options)
        if job_file is None
        else _of_job(job_file, overrides, evals, tokenizer, seq_len, options)
    )
    for name in scene.others:
        say(f"note: {name} is not checked: name it beside its folder to check it too")
    began = time.monotonic()
    found = survey(
        scene.asked, _show(sum(map(size_of, (*scene.asked.files, *scene.asked.eval_files))))
    )
    verdict = judge_data(
        found,
        limits=own_limits,
        labels=scene.labels,
        seq_len=scene.asked.seq_len,
        windows=scene.windows,
        refuses_long=scene.refuses_long,
        quality=quality,
        path=str(scene.asked.files[0]),
    )
    kept = {
        "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "findings": len(verdict.findings) + verdict.hidden,
        "errors": verdict.errors,
        "worst": verdict.findings[0].what if verdict.findings else "",
        "seq_len": scene.asked.seq_len,
    }
    if keep and not any("://" in file for file in (*scene.asked.files, *scene.asked.eval_files)):
        files = scene.asked.files, scene.asked.eval_files
        try:
            kept["contents"] = keep_checked(scene.folder, *files, kept).contents
        except JobError as error:  # the answer is worth more than its memory
            say(f"note: the result is not kept for plan and preflight: {error.problems[0].what}")
    from paceline.report.data_check import data_check_json, format_data_check, render_data_page

    data = data_check_json(scene.asked, found, verdict, quality, seconds=time.monotonic() - began)
    if html is not None:
        html.write_text(render_data_page(data), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(data | {"check": kept}, indent=2))
    else:
        show("\n".join(format_data_check(data)))
    return 1 if verdict.errors else 0


_LONG_S = 10.0
"""After so long reading, comparing takes a while too (a guess)."""


class _Scene(NamedTuple):
    asked: "Asked"
    folder: Path
    """Beside which the result is kept."""

    others: list[str] = []  # noqa: RUF012
    labels: tuple[str, ...] = ()
    windows: bool = False
    refuses_long: bool = False


def _of_paths(
    paths: tuple[str, ...],
    evals: tuple[str, ...],
    tokenizer: str | None,
    seq_len: int | None,
    options: dict[str, Any],
) -> _Scene:
    from paceline.job.sources import by_split, find_files
    from paceline.prepare.survey import Asked
    from paceline.profile.fitting import listed

    if seq_len is not None and tokenizer is None:
        raise click.UsageError("--seq-len counts tokens: give --tokenizer or --job too.")
    files, others = find_files(paths)
    eval_files, eval_others = find_files(evals)
    if not evals:
        files, eval_files = by_split(files, paths)
    if eval_files and not evals:
        say(
            f"note: {listed([_shown(file) for file in eval_files])}: evaluated on, by name; no row "
            "of them may be trained on. --eval names others; files named one by one are trained on"
        )
    asked = Asked(
        files=[_shown(file) for file in files],
        eval_files=[_shown(file) for file in eval_files],
        tokenizer=read_tokenizer_named(tokenizer) if tokenizer is not None else None,
        seq_len=seq_len,
        **options,
    )
    _check_sides(asked)
    return _Scene(asked, Path(), [_shown(each) for each in (*others, *eval_others)])


def _of_job(
    job_file: Path,
    overrides: tuple[str, ...],
    evals: tuple[str, ...],
    tokenizer: str | None,
    seq_len: int | None,
    options: dict[str, Any],
) -> _Scene:
    from paceline.cli.job_input import read_job
    from paceline.job.data_rules import is_prepared
    from paceline.job.length_rules import uncounted
    from paceline.prepare.checked import files_of
    from paceline.prepare.survey import Asked

    if tokenizer is not None or seq_len is not None or evals:
        raise click.UsageError(
            "--tokenizer, --seq-len and --eval are the job's: give --set model.tokenizer=..., "
            "data.seq_len=... or data.held_out_path=... instead."
        )
    job = read_job(job_file, overrides, count=uncounted)
    files, eval_files = files_of(job)
    data = job.spec.data
    more, windows = _recipes(job) if is_prepared(job) else ({}, True)
    asked = Asked(
        files=[_shown(file) for file in files],
        eval_files=[_shown(file) for file in eval_files],
        seq_len=data.seq_len,
        **more,
        **options,
    )
    return _Scene(
        asked,
        job.folder,
        labels=tuple(map(str, data.labels or ())),
        windows=windows,
        refuses_long=data.too_long == "refuse",
    )


def _recipes(job: "Job") -> tuple[dict[str, Any], bool]:
    """How the job makes documents of each file, and whether it joins them."""
    from paceline.job.sources import find_held_out, find_sources
    from paceline.prepare.before import read_job_tokenizer, recipes_of

    tokenizer, held_out = read_job_tokenizer(job), find_held_out(job)
    sources = [*find_sources(job), *([held_out] if held_out is not None else [])]
    recipes, pack = recipes_of(job, tokenizer, sources)
    by_file = {
        _shown(file): recipes[source.name]
        for source in sources
        for file in source.files
        if not file.endswith(".bin")
    }
    return {"tokenizer": tokenizer, "recipes": by_file}, pack == "windows"


def read_tokenizer_named(named: str) -> Any:
    """A tokenizer by its folder or file: read as a job's is."""
    from paceline.job import parse_job
    from paceline.prepare.tokenizer import read_tokenizer

    # The model is a form to fill in: of it, only the tokenizer is read.
    text = json.dumps(
        {
            "model": {
                "decoder": {"layers": 1, "hidden": 8, "heads": 1, "vocab": 1 << 24},
                "tokenizer": named,
            },
            "train": {"global_batch": 1, "steps": 1},
            "data": {"corpus": "python-stdlib"},
        }
    )
    return read_tokenizer(parse_job(text, source="--tokenizer", folder=Path()))


def _check_sides(asked: "Asked") -> None:
    for file in asked.eval_files:
        if file in asked.files:
            raise JobError.of(
                code="D022",
                what=f"{file} is on both sides",
                where="--eval",
                fix="give the training files without it: 'data/train*.jsonl'",
            )


def _limits(given: tuple[str, ...]) -> dict[str, float]:
    from paceline.check.data import CHECKS

    found: dict[str, float] = {}
    for each in given:
        name, _, share = each.partition("=")
        if name not in CHECKS:
            hint = did_you_mean(name, CHECKS) or f"it is one of {', '.join(CHECKS)}"
            raise click.BadParameter(f"there is no check {name}; {hint}", param_hint="--limit")
        try:
            value = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise click.BadParameter(
                f"{each}: give a share from 0 to 1, or percent: {name}=5%", param_hint="--limit"
            )
        found[name] = value
    return found


def _shown(file: str) -> str:
    """Relative to the current folder, where it is below it."""
    near = file if "://" in file else os.path.relpath(file)
    return file if near.startswith("..") else near


def _show(num_bytes: int) -> "Callable[[Step], None]":
    screen, began = Screen(), time.monotonic()

    def show(step: "Step") -> None:
        if screen.is_live_due():
            took_s = time.monotonic() - began
            screen.live(
                f"checking    {step.files_done}/{step.num_files} files  "
                f"{format_bytes(step.num_bytes)} of {format_bytes(num_bytes)}  {took_s:.0f} s"
            )
        if step.files_done == step.num_files:
            screen.end_live()
            if time.monotonic() - began > _LONG_S:
                screen.line("comparing   every row with its like")

    return show
