"""`paceline stop`: end a run gently, wherever it is."""

import json
from pathlib import Path

import click

from paceline.cli.options import RunName, json_option, runs_option


@click.command()
@click.argument("run", metavar="RUN", type=RunName())
@runs_option
@json_option
def command(run: str, runs: Path, as_json: bool) -> int:
    """Save RUN at the next step boundary and end it; a run that waits in a queue leaves it.

    It does what Ctrl-C does there; `paceline run --resume RUN` resumes it later. RUN is as for
    `paceline status`: a job PLACE:ID is ended by the place's own tool.

    \b
    Examples:
      paceline stop runs/my-job-20261121-101500
      paceline stop 4711
      paceline stop login-node:/data/runs/my-job-20261121-101500
      paceline stop slurm:4711
    """
    from paceline.launch.remote_jobs import FarRun, find_elsewhere, stop_elsewhere
    from paceline.launch.run_status import stop

    there = find_elsewhere(run)
    if isinstance(there, FarRun):
        return there.do("stop", *(["--json"] if as_json else []))
    asked = stop_elsewhere(there) if there is not None else stop(run, runs)
    click.echo(json.dumps({"asked": asked}) if as_json else asked)
    return 0
