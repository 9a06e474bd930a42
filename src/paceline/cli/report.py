"""`paceline report`: a run's page, or its report as Markdown or JSON."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, RunName, json_option, runs_option
from paceline.errors import JobError

if TYPE_CHECKING:
    from paceline.record.run import RunFolder


@click.command()
@click.argument("run", metavar="RUN", type=RunName())
@click.option(
    "--out",
    type=PathName(path_type=Path),
    help="[default: report.html in the run; with --md and --json, standard output]",
)
@click.option("--md", "as_markdown", is_flag=True, help="Markdown, for a pull request or a wiki.")
@click.option(
    "--bench",
    "bench_file",
    type=PathName(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="With --md or --json: the bench.json of the job, for the scaling section.",
)
@runs_option
@json_option
def command(
    run: str,
    out: Path | None,
    as_markdown: bool,
    bench_file: Path | None,
    runs: Path,
    as_json: bool,
) -> None:
    """Write the page of RUN: one HTML file with everything inside.

    RUN is a run's folder, its name, or a queue's id of it. Works at any time, also during the
    run: it is the page of `paceline watch` as it is at that moment.

    With --md or --json it is a report without plots: throughput and MFU, where the time went, the
    memory of each rank, scaling (with --bench), and why the layout was chosen.

    \b
    Examples:
      paceline report runs/tiny-lm-20261121-101500
      paceline report runs/tiny-lm-20261121-101500 --out /tmp/page.html
      paceline report RUN --md --bench bench/bench.json --out report.md
      paceline report runs/tiny-lm-20261121-101500 --json
    """
    from paceline.launch.run_status import find_run
    from paceline.record.gather import write_page

    if as_markdown and as_json:
        raise click.UsageError("--md and --json are two forms; give one of them")
    if bench_file is not None and not (as_markdown or as_json):
        raise click.UsageError("--bench is for --md and --json; bench.html is the bench's own page")
    found = find_run(run, runs)
    try:
        if as_markdown or as_json:
            text = report_text(found, bench_file, as_json=as_json)
            click.echo(text, nl=False) if out is None else click.echo(write_page(out, text))
            return
        click.echo(write_report(found, out))
    except ImportError as error:
        raise JobError.of(
            code="R010",
            what=f"the page needs {error.name}, which is not installed",
            where="paceline report",
            fix="pip install Jinja2",
        ) from None
    except OSError as error:
        raise JobError.of(
            code="R002",
            what=f"the page cannot be written: {error.filename}: {error.strerror}",
            where="--out" if out is not None else str(found.report_file),
            fix="give a file in a folder you may write to, on a disk with room",
        ) from None


def report_text(run: "RunFolder", bench_file: Path | None, *, as_json: bool) -> str:
    """A run's report as JSON or Markdown.

    Raises:
        JobError: `R002`, the bench cannot be read.
    """
    from paceline.record.gather import gather
    from paceline.record.run_row import read_row
    from paceline.report.run_report import parse_bench, report_json, report_markdown, report_of

    bench = None if bench_file is None else parse_bench(bench_file.read_bytes(), str(bench_file))
    record = gather(run)
    report = report_of(record, read_row(run.path), bench)
    return report_json(report) + "\n" if as_json else report_markdown(record, report)


def write_report(run: "RunFolder", out: Path | None = None) -> Path:
    """Write a run's page, and say where.

    Raises:
        ImportError: Jinja2 is not installed.
        OSError: The page cannot be written.
    """
    from paceline.record.gather import gather, write_page
    from paceline.report.page import render_page

    return write_page(out or run.report_file, render_page(gather(run)))


def try_report(run: "RunFolder", *, wanted: bool) -> tuple[Path | None, str | None]:
    """A run's page at its end, or why there is none."""
    if not wanted:
        return None, "`paceline report RUN` writes it"
    try:
        return write_report(run), None
    except ImportError as error:
        return None, f"{error.name} is not installed: pip install Jinja2"
    except OSError as error:
        return None, f"it cannot be written: {error.filename}: {error.strerror}"
