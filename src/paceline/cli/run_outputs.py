"""What a finished run makes of its prompts and tasks, as `paceline run` shows it."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from paceline.launch.outputs import make_outputs
from paceline.record.outputs import NAME, Outputs
from paceline.record.run import RunFolder
from paceline.units import counted


def make_and_show(run: RunFolder, note: Callable[[str], None]) -> None:
    """Do prompts and tasks, and say for each checkpoint how it went."""

    def show(outputs: Outputs) -> None:
        at = f"after step {outputs.step}"
        if outputs.generations:
            note(f"evaluate.prompts {at}: {counted(len(outputs.generations), 'continuation')}")
        for score in outputs.scores:
            note(f"evaluate.tasks {at}: {score}")
        if outputs.problem is not None:
            note(f"evaluate {at}: not everything was answered: {outputs.problem}")

    note(f"evaluate: checkpoints are exported for prompts and tasks, into {NAME}")
    make_outputs(run, show)


def make_up_outputs(run: RunFolder, *, reports: bool, as_json: bool) -> int:
    """Do what a finished run lacks, as its command was killed."""
    from paceline.cli.report import try_report

    make_and_show(run, partial(click.echo, err=as_json))
    report, why_not = try_report(run, wanted=reports)
    click.echo(f"report      {report or why_not}", err=as_json)
    if as_json:
        click.echo(json.dumps(summary(run, report), indent=2))
    return 0


def summary(run: RunFolder, report: Path | None) -> dict[str, Any]:
    """The run's row of `paceline runs`, and where its report is."""
    from paceline.record.run_row import read_row

    return asdict(read_row(run.path)) | {"report": str(report) if report else None}
