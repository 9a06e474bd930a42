"""`paceline logs`: what a run's processes have printed, wherever it is."""

import subprocess
from pathlib import Path

import click

from paceline.cli.options import runs_option


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--rank", type=click.IntRange(min=0), help="Only this rank. [default: every log of the run]"
)
@click.option("--follow", "-f", is_flag=True, help="Go on until the run is over, or Ctrl-C.")
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="So many last lines of each log first; 0 is all of it.",
)
@runs_option
def command(run: str, rank: int | None, follow: bool, tail: int, runs: Path) -> int:
    """Print the logs of RUN: each line with the log that it is from.

    RUN is as for `paceline status`. Logs of a place that keeps them itself are asked for there.

    \b
    Examples:
      paceline logs runs/my-job-20261121-101500
      paceline logs 4711 --rank 3 --tail 0
      paceline logs 4711 --follow
    """
    from paceline.launch.logs import print_logs
    from paceline.launch.places import queued
    from paceline.launch.standing import find_run
    from paceline.record.placement import read_placement

    found = find_run(run, runs)
    placement = read_placement(found.path)
    if placement is not None and placement.job_id is not None:
        elsewhere = queued(placement.place).log_command(placement, rank, follow)
        if elsewhere is not None:
            return subprocess.run(elsewhere, check=False).returncode
    print_logs(found, rank=rank, tail=tail, follow=follow, write=click.echo)
    return 0
