"""`paceline stop`: end a run gently, wherever it is."""

import json
from pathlib import Path

import click

from paceline.cli.options import json_option, runs_option


@click.command()
@click.argument("run", metavar="RUN")
@runs_option
@json_option
def command(run: str, runs: Path, as_json: bool) -> None:
    """Ask RUN to save at the next step boundary and end; a run that waits in a queue leaves it.

    As Ctrl-C where it runs. It goes on later with `paceline run --resume RUN`. RUN is as for
    `paceline status`.

    \b
    Examples:
      paceline stop runs/my-job-20261121-101500
      paceline stop 4711
    """
    from paceline.launch.standing import stop

    asked = stop(run, runs)
    click.echo(json.dumps({"asked": asked}) if as_json else asked)
