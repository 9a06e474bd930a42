"""`paceline logs`: what a run's processes have printed, wherever it is."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

from paceline.cli.options import RunName, runs_option


@click.command()
@click.argument("run", metavar="RUN", type=RunName())
@click.option(
    "--rank", type=click.IntRange(min=0), help="Only this rank. [default: every log of the run]"
)
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run ends, or Ctrl-C.")
@click.option(
    "--tail",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Start with the last N lines of each log; 0 prints all.",
)
@runs_option
def command(run: str, rank: int | None, follow: bool, tail: int, runs: Path) -> int:
    """Print the logs of RUN: each line with the name of its log.

    RUN is as for `paceline status`. Logs that the place keeps are read there. A rank's log also
    shows its newest steps.

    \b
    Examples:
      paceline logs runs/my-job-20261121-101500
      paceline logs 4711 --rank 3 --tail 0
      paceline logs 4711 --follow
      paceline logs login-node:/data/runs/my-job-20261121-101500
      paceline logs slurm:4711
    """
    from paceline.launch.logs import print_logs
    from paceline.launch.places import queued
    from paceline.launch.remote_jobs import FarRun, find_elsewhere, log_command, naming_command
    from paceline.launch.run_status import find_run
    from paceline.record.placement import read_placement

    there = find_elsewhere(run)
    if isinstance(there, FarRun):
        words = [*(("--rank", str(rank)) if rank is not None else ()), f"--tail={tail}"]
        return there.do("logs", *words, *(["--follow"] if follow else []))
    if there is not None:
        return _print(log_command(there, rank, follow=follow, tail=tail))
    found = find_run(run, runs)
    placement = read_placement(found.path)
    if placement is not None and placement.job_id is not None:
        with naming_command(placement, "logs"):
            elsewhere = queued(placement.place).log_command(placement, rank, follow)
        if elsewhere is not None:
            return _print(elsewhere)
    print_logs(found, rank=rank, tail=tail, follow=follow, write=click.echo)
    return 0


def _print(words: Sequence[str]) -> int:
    """What a command of the place prints, and its exit code."""
    return subprocess.run(words, check=False).returncode
