"""`paceline data`: check data, prepare a job's before the run, and show what a sample is."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from paceline.cli.data_check import check
from paceline.cli.options import PathName, json_option, set_option
from paceline.cli.prepare_progress import read_as
from paceline.cli.screen import show
from paceline.report.table import format_table
from paceline.units import counted

if TYPE_CHECKING:
    from paceline.job import Job
    from paceline.prepare import Index
    from paceline.prepare.show import ShownSample

_job = click.argument("job_file", metavar="JOB", type=PathName(path_type=Path))


@click.group(invoke_without_command=False)
def command() -> None:
    """Check data, tokenize it before a run, and show samples.

    Rows become documents, tokens and packs in `.paceline/data` beside the job file (`data.cache`).
    `paceline run` does the same before any rank starts. A preparation that was killed is resumed at
    the file where it was.

    \b
    Examples:
      paceline data check chats.jsonl --eval eval.jsonl
      paceline data prepare job.yaml
      paceline data show job.yaml --sample 7
      paceline data show job.yaml --sample 0 --held-out --json
    """


command.add_command(check)


@command.command("prepare")
@_job
@set_option
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Processes that tokenize. Left out, one a core.",
)
@json_option
def prepare(
    job_file: Path, overrides: tuple[str, ...], processes: int | None, as_json: bool
) -> None:
    """Tokenize and pack a job's data now, and count what was made.

    \b
    Examples:
      paceline data prepare job.yaml
      paceline data prepare job.yaml --set data.seq_len=2048 --processes 4
    """
    from paceline.cli.prepare_progress import show_preparing
    from paceline.prepare import fingerprint, open_index, prepared

    folder = prepared(_read(job_file, overrides), show_preparing(), processes=processes)
    index = open_index(folder)
    if as_json:
        data = msgspec.to_builtins(index)
        click.echo(
            json.dumps(
                {"folder": str(folder), "fingerprint": fingerprint(folder), **data}, indent=2
            )
        )
        return
    for line in format_index(index):
        show(line)
    show(f"folder      {folder}")


@command.command("show")
@_job
@set_option
@click.option("--sample", type=click.IntRange(min=0), required=True, help="Number of the sample.")
@click.option("--held-out", is_flag=True, help="Count held-out samples instead.")
@json_option
def show_documents(
    job_file: Path, overrides: tuple[str, ...], sample: int, held_out: bool, as_json: bool
) -> None:
    """Print one sample's documents; the loss counts what is in [[ ]].

    \b
    Examples:
      paceline data show job.yaml --sample 7
      paceline data show job.yaml --sample 0 --held-out
    """
    from paceline.job.sources import find_tokenizer
    from paceline.prepare import find_prepared
    from paceline.prepare.show import show_sample

    job = _read(job_file, overrides)
    folder = find_prepared(job)
    if folder is None:
        raise _not_prepared(job)
    shown = show_sample(folder, sample, find_tokenizer(job), held_out=held_out)
    if as_json:
        click.echo(json.dumps(asdict(shown), indent=2))
        return
    for line in _lines_of(shown):
        click.echo(line)


def _read(job_file: Path, overrides: tuple[str, ...]) -> "Job":
    """
    Raises:
        JobError: The job is wrong, or its data need no preparation.
    """
    from paceline.cli.job_input import read_job
    from paceline.errors import JobError
    from paceline.job.data_rules import is_prepared
    from paceline.job.length_rules import uncounted

    job = read_job(job_file, overrides, count=uncounted)
    if is_prepared(job):
        return job
    raise JobError.of(
        code="D020",
        what="this job's data are not prepared: its text is read as bytes, or a program reads its "
        "own",
        where=job.where("data"),
        fix="give model.tokenizer or data.sources to prepare them; else start with `paceline run`",
    )


def _not_prepared(job: "Job") -> Exception:
    from paceline.errors import JobError

    return JobError.of(
        code="D020",
        what="the data of this job are not prepared yet",
        where=job.where("data"),
        fix="run `paceline data prepare` first",
    )


def format_index(index: "Index") -> list[str]:
    """What was prepared, for a person."""
    rows: list[tuple[str, ...]] = [
        ("SOURCE", "SIDE", "WEIGHT", "DOCUMENTS", "TOKENS", "TRAINED ON", "SAMPLES", "PADDING")
    ]
    for side, sources in (("train", index.train), ("held out", index.held_out)):
        for source in sources:
            counts = (source.documents, source.tokens, source.targets, source.samples)
            weight = "by size" if source.weight is None else f"{source.weight:g}"
            cells: list[Any] = [source.name, side, weight, *(f"{count:,}" for count in counts)]
            padding = "-" if index.pack == "windows" else f"{source.padding(index.seq_len):.2%}"
            rows.append((*cells, padding))
    lines = format_table(rows).splitlines()
    samples = f"samples     {index.seq_len} tokens, {index.pack}; vocabulary {index.vocab:,}"
    lines.append(f"{samples}; {index.padding:.2%} of a batch is padding")
    lines += read_as(index)
    for out in index.left_out:
        place = f", first {out.example}" if out.example else ""
        lines.append(f"left out    {out.source}: {out.documents:,} x {out.reason}{place}")
    return lines


def _lines_of(shown: "ShownSample") -> list[str]:
    documents = f"{counted(len(shown.documents), 'document')}, {shown.filled} tokens of padding"
    lines = [f"sample {shown.sample} of {shown.source}: {documents}"]
    for document in shown.documents:
        lines.append("")
        number = document.document // 2 if document.side else document.document
        lines.append(
            f"--- {document.side or 'document'} {number}: {document.num_tokens} tokens, "
            f"{document.num_trained} trained on"
        )
        texts = (f"[[{text}]]" if is_trained else text for is_trained, text in document.parts)
        lines.append("".join(texts))
    return lines
