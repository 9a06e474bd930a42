"""`paceline alerts`: what a run's rules are, what fired, and what other rules would have done."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import PathName, RunName, json_option, runs_option
from paceline.cli.screen import show

if TYPE_CHECKING:
    from paceline.launch.replay import Judged


@click.command()
@click.argument("run", metavar="RUN", type=RunName())
@click.option(
    "--rules",
    "rules",
    metavar="FILE",
    type=PathName(path_type=Path),
    help="Rules in place of the run's own, with the keys of the job file's section `alerts`.",
)
@runs_option
@json_option
def command(run: str, rules: Path | None, runs: Path, as_json: bool) -> None:
    """Test alert rules on a recorded RUN: how often each would have fired, and when.

    Nothing is sent and nothing is recorded. RUN may still be running. Without --rules, the rules
    are the run's own: its job's and the built-in ones.

    \b
    Examples:
      paceline alerts runs/my-job-20261121-101500
      paceline alerts runs/my-job-... --rules alerts.yaml
      paceline alerts runs/my-job-... --json
    """
    from paceline.launch.replay import replay

    found = replay(run, runs, rules)
    if as_json:
        click.echo(json.dumps([_row(judged) for judged in found], indent=2))
        return
    width = max((len(judged.rule.name) for judged in found), default=0)
    for judged in found:
        show(f"{judged.rule.name:<{width}}  {_count(judged)}  {judged.rule.condition}")
        for event in judged.fired[:_MOST_SHOWN]:
            of = f", {event.of}" if event.of else ""
            step = f" at step {event.step}" if event.step is not None else ""
            value = "" if event.value is None else f": {event.value:.6g}"
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
            show(f"{'':<{width}}    {clock}{step}{of}{value}")
        if len(judged.fired) > _MOST_SHOWN:
            show(f"{'':<{width}}    and {len(judged.fired) - _MOST_SHOWN} times more")


_MOST_SHOWN = 5


def _count(judged: "Judged") -> str:
    if not judged.is_measured:
        return "not measured"
    return f"fired {len(judged.fired)} x" if judged.fired else "did not fire"


def _row(judged: "Judged") -> dict[str, Any]:
    rule = judged.rule
    return {
        "rule": rule.name,
        "condition": rule.condition,
        "severity": rule.severity,
        "on_alert": rule.on_alert,
        "is_measured": judged.is_measured,
        "fired": [
            {"at": event.at, "step": event.step, "of": event.of, "value": event.value}
            for event in judged.fired
        ],
    }
