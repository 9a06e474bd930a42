"""`paceline runs`: the registry."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import json_option, runs_option

if TYPE_CHECKING:
    from paceline.record.run import RunSummary


@click.command()
@runs_option
@json_option
def command(runs: Path, as_json: bool) -> None:
    """List the runs in a folder, oldest first.

    \b
    Examples:
      paceline runs
      paceline runs --runs /data/runs --json
    """
    from paceline.record.run import find_runs, summarise

    rows = [summarise(run) for run in find_runs(runs)]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    if not rows:
        click.echo(f"no runs in {runs}", err=True)
        return
    table: list[tuple[str, ...]] = [
        ("RUN", "STATE", "STEP", "LOSS", "HELD-OUT", "RESTARTS", "EXACT", "LAYOUT", "STARTED")
    ]
    table.extend(_cells(row) for row in rows)
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _cells(row: "RunSummary") -> tuple[str, ...]:
    return (
        Path(row.folder).name,
        row.state,
        f"{row.step}/{row.num_steps}" if row.num_steps else str(row.step or "-"),
        "-" if row.loss is None else f"{row.loss:.4f}",
        "-" if row.held_out_loss is None else f"{row.held_out_loss:.4f}",
        str(row.restarts),
        row.exactness,
        row.layout,
        time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created_at)),
    )
