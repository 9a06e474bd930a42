"""`paceline runs`: the registry."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from paceline.cli.options import json_option, runs_option
from paceline.cli.runs_send import command as send
from paceline.cli.screen import show


@click.group(invoke_without_command=True)
@click.option(
    "--where",
    metavar="EXPRESSION",
    help="Only runs of which this holds: fields compared with < <= > >= = != or ~ (contains), "
    "joined with and, or, not and parentheses. A name with a dot is a setting of the job.",
)
@click.option(
    "--sort",
    metavar="FIELDS",
    default="created_at",
    show_default=True,
    help="Order by these fields, separated by commas; a dash before one is from high to low. "
    "What is unknown comes last.",
)
@click.option(
    "--columns", metavar="FIELDS", help="Show these fields and settings, separated by commas."
)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N of them.")
@runs_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    where: str | None,
    sort: str,
    columns: str | None,
    last: int | None,
    runs: Path,
    as_json: bool,
) -> None:
    """List the runs in a folder, oldest first; `compare` shows several beside each other, `send`
    sends the metrics of one to a tracker.

    A field that does not exist is answered with the list of all. An index in the user's cache
    folder makes the list fast; it can be deleted at any time.

    \b
    Examples:
      paceline runs
      paceline runs --where 'eval_loss<2 and layout~FSDP' --sort eval_loss
      paceline runs --where 'state=running or (state=failed and not restarts=0)'
      paceline runs --where 'train.learning_rate>=3e-4 and started_at>2026-11-01'
      paceline runs --columns run,eval_loss,train.learning_rate,commit,dirty
      paceline runs --runs /data/runs --sort -tokens_per_s --last 10 --json
      paceline runs compare tiny-lm-20261121-101500 tiny-lm-20261122-091000
    """
    if context.invoked_subcommand is not None:
        context.default_map = {context.invoked_subcommand: {"runs": runs}}
        return
    from paceline.record.query import find_runs
    from paceline.report.runs_text import COLUMNS, list_lines
    from paceline.report.table import COLUMNS as SCREEN

    shown = [name.strip() for name in (columns or "").split(",") if name.strip()]
    found = find_runs(runs, where=where, sort=sort, columns=shown, last=last)
    if found.listing.note is not None:
        show(f"note: {found.listing.note}", err=True)
    if as_json:
        every = [
            {name: found.value(row, name) for name in shown} if shown else asdict(row)
            for row in found.rows
        ]
        click.echo(json.dumps(every, indent=2, default=str))
        return
    if not found.rows:
        show(
            f"no runs in the folder {runs}" if not found.listing.rows else "no such runs", err=True
        )
        return
    width = None if shown else SCREEN.get()
    lines = list_lines(found.rows, shown or COLUMNS, found.value, width=width)
    (click.echo if width is None else show)("\n".join(lines))


command.add_command(send)


@command.command("compare")
@click.argument("named", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--all", "all_settings", is_flag=True, help="List the settings that are the same, too."
)
@click.option(
    "--points",
    type=click.IntRange(min=1, max=100_000),
    metavar="N",
    help="Points of a curve, each the mean of a stretch of steps. [default: 8; with --json, 200]",
)
@runs_option
@json_option
def compare(
    named: tuple[str, ...],
    all_settings: bool,
    points: int | None,
    runs: Path,
    as_json: bool,
) -> None:
    """Compare runs: jobs, plans, code, results, curves, bits.

    RUN is a run's folder, its name in the folder of all runs, or the id that a queue has given it.
    Whether two runs computed the same bits is known from the digests that they recorded.

    \b
    Examples:
      paceline runs compare tiny-lm-20261121-101500 tiny-lm-20261122-091000
      paceline runs compare runs/a runs/b runs/c --points 20
      paceline runs compare 4711 4712 --all --json
    """
    from paceline.record.compare import compare_runs
    from paceline.record.registry import run_folder
    from paceline.report.runs_text import comparison_lines

    folders = [run_folder(name, runs) for name in named]
    count = points or (200 if as_json else 8)
    found = compare_runs(folders, points=count, all_settings=all_settings)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2, default=str))
        return
    show("\n".join(comparison_lines(found, all_settings=all_settings)))
