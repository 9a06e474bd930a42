"""`paceline report`: a run's page."""

from pathlib import Path

import click

from paceline.errors import JobError, Problem


@click.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="[default: report.html in the run]")
def command(run_folder: Path, out: Path | None) -> None:
    """Write the page of the run in folder RUN: one HTML file, plots inside.

    Works at any time, also while the run goes on.

    \b
    Examples:
      paceline report runs/tiny-lm-20261121-101500
      paceline report runs/tiny-lm-20261121-101500 --out /tmp/page.html
    """
    from paceline.record.run import open_run

    run = open_run(run_folder)
    try:
        from paceline.report.page import write_report
    except ImportError as error:
        raise JobError(
            Problem(
                code="R010",
                what=f"the page needs {error.name}, which is not installed",
                where="paceline report",
                fix="pip install 'paceline[report]'",
            )
        ) from None
    click.echo(write_report(run, out))
