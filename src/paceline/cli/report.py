"""`paceline report`: a run's page."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import PathName, runs_option
from paceline.errors import JobError

if TYPE_CHECKING:
    from paceline.record.run import RunFolder


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--out", type=PathName(path_type=Path), help="[default: report.html in the run]")
@runs_option
def command(run: str, out: Path | None, runs: Path) -> None:
    """Write the page of RUN: one HTML file with everything inside.

    RUN is a run's folder, its name, or a queue's id of it. Works at any time, also while the run
    goes on: it is the page of `paceline watch`, frozen.

    \b
    Examples:
      paceline report runs/tiny-lm-20261121-101500
      paceline report runs/tiny-lm-20261121-101500 --out /tmp/page.html
    """
    from paceline.launch.standing import find_run

    found = find_run(run, runs)
    try:
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
