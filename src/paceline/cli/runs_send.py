"""`paceline runs send`: a run's metrics to a sink, from its files."""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from paceline.choices.sinks import SINKS
from paceline.cli.options import RunName, json_option, runs_option, set_option


@click.command("send")
@click.argument("run", metavar="RUN", type=RunName())
@click.option(
    "--to",
    "sink",
    type=click.Choice([name for name, row in SINKS.items() if row.keeps_steps]),
    required=True,
    help="Where to send it.",
)
@click.option(
    "--again", is_flag=True, help="Send everything, also what is known to have been sent."
)
@runs_option
@set_option
@json_option
def command(
    run: str,
    sink: str,
    again: bool,
    runs: Path,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Send RUN's recorded metrics to a tracker.

    Metrics, evaluations, pictures and texts are read from the run's files. Only what the tracker
    does not have yet is sent. Settings are those of the run's job, changed by --set. Keys are taken
    from the environment.

    \b
    Examples:
      paceline runs send tiny-lm-20261121-101500 --to tensorboard
      paceline runs send runs/my-job-... --to wandb --set metrics.wandb.project=me
      paceline runs send runs/my-job-... --to mlflow
    """
    from paceline.launch.sinks.send import send_run
    from paceline.record.registry import run_folder
    from paceline.record.run import open_run

    folder = run_folder(run, runs)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print where they send to
        sent = send_run(open_run(folder), sink, overrides=overrides, again=again)
    if as_json:
        click.echo(json.dumps(asdict(sent), indent=2))
        return
    title = SINKS[sink].title
    if sent.num_steps == 0:
        click.echo(f"{title} has every step already; --again sends all of it")
    else:
        click.echo(f"sent {sent.num_steps} steps to {title}, up to step {sent.newest_step}")
