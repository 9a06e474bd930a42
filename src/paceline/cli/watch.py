"""`paceline watch`: runs on a live page, or as text."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option, runs_option
from paceline.cli.screen import show
from paceline.errors import JobError

if TYPE_CHECKING:
    from paceline.record.run_row import RunRow


@click.command()
@click.argument("named", metavar="[RUN]...", nargs=-1)
@runs_option
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    help="Port of the page. [default: 7341, or the next free one]",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Others than this machine's own can be reached by everybody on the "
    "network; the token still guards the page.",
)
@click.option("--text", "as_text", is_flag=True, help="Print how each RUN stands, and end.")
@json_option
def command(
    named: tuple[str, ...],
    runs: Path,
    port: int | None,
    host: str,
    as_text: bool,
    as_json: bool,
) -> None:
    """Show runs on a live page: curves, ranks, events, logs, cost; several laid over each other.

    RUN is a run's folder, its name, or a queue's id of it, 20 at most; without it the page lists
    every run in the folder of all runs. The page reads the run's files, during the run and
    afterwards, and does not disturb the run. Start it where the folder is: on the login node of a
    Slurm cluster, on the head node of a Ray cluster, or here; the `ssh -L` line that it prints
    brings it to your own browser.

    \b
    Examples:
      paceline watch
      paceline watch runs/tiny-lm-20261121-101500
      paceline watch run-a run-b run-c            their curves over each other
      paceline watch runs/tiny-lm-20261121-101500 --text
    """
    if len(named) > _MOST:
        raise click.UsageError(f"{len(named)} runs are named; a page shows {_MOST} at most.")
    if as_text or as_json:
        _print_once(named, runs, as_json=as_json)
        return
    try:
        from paceline.live.serve import serve
    except ImportError as error:
        from paceline.job.packages import install_line

        raise JobError.of(
            code="R010",
            what=f"the live page needs {error.name}, which is not installed",
            where="paceline watch",
            fix=f"{install_line('live')}; `paceline watch RUN --text` needs nothing more",
        ) from None
    _find(named, runs)  # what is wrong with a name is said before the page is there
    serve(
        lambda: _find(named, runs),
        shown=named,
        host=host,
        port=port,
        write=lambda text: click.echo(text, err=True),
    )


def _find(named: tuple[str, ...], runs: Path) -> "Mapping[str, RunRow]":
    """Key -> run: those named, in that order, or all in the folder of all runs, newest first."""
    from paceline.launch.run_status import find_run
    from paceline.record.registry import list_runs
    from paceline.record.run_row import read_row

    if not named:
        return {row.run: row for row in reversed(list_runs(runs).rows)}
    found: dict[str, RunRow] = {}
    for name in named:
        row = read_row(find_run(name, runs).path)
        found[row.run if row.run not in found else row.folder] = row
    return found


def _print_once(named: tuple[str, ...], runs: Path, *, as_json: bool) -> None:
    from paceline.live.watched import Watched
    from paceline.record.run import RunFolder
    from paceline.report.picture import happened, head

    pictures = []
    for key, row in _find(named, runs).items():
        if row.damage is not None:
            click.echo(f"{key}: damaged: {row.damage}", err=True)
        watched = Watched(RunFolder(Path(row.folder)))
        try:
            watched.look()
        except JobError:
            if named:
                raise
            continue
        pictures.append({"run": key, **watched.show(lambda view: {**head(view), **happened(view)})})
    if as_json:
        click.echo(json.dumps(pictures, indent=2))
        return
    for picture in pictures:
        show("\n".join(_lines(picture)))


_MOST = 20
"""Runs on one page; `live/server.py` shows no more."""

_NEWEST = 8
"""Events that are printed. A guess: with the rest they fill a small terminal."""


def _lines(picture: Mapping[str, Any]) -> list[str]:
    ranks = picture["ranks"]
    lines = [f"{picture['run']}  {picture['outcome']}", f"  {picture['sentence']}"]
    lines += [
        f"  {tile['name']:<16} {tile['value']:<22} {tile['note']}" for tile in picture["tiles"]
    ]
    lines.append(f"  {'Ranks':<16} {ranks['num'] - len(ranks['odd'])} {ranks['usual']}")
    lines += [
        f"  {'rank ' + str(o['rank']):<16} {o['state']}: {o['text']}" for o in ranks["odd"][:20]
    ]
    for event in picture["events"][-_NEWEST:]:
        clock = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        lines.append(f"  {clock}  {event['text']}")
    return lines
