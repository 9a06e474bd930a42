"""`paceline scan`: what the programs of a tree have of a training."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import click

from paceline.cli.options import FiniteRange, PathName, json_option
from paceline.cli.screen import show

_FILE_S = 20.0
"""Longest that one file is read. The slowest of 548 files of three repositories took 2.2 s."""


@click.command()
@click.argument(
    "paths",
    metavar="PATH...",
    nargs=-1,
    required=True,
    type=PathName(path_type=Path, readable=False),  # one that may not be read is said, as others
)
@click.option("--all", "shows_all", is_flag=True, help="Show every part of every program.")
@click.option(
    "--timeout",
    type=FiniteRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds for all files; those that are left then are listed as not read.",
)
@json_option
def command(paths: tuple[Path, ...], shows_all: bool, timeout: float, as_json: bool) -> int:
    """Show how each program trains: framework, loops, devices, loaders, optimizer, wrapping
    (DDP, FSDP, DeepSpeed, Accelerate, ...), saves, loads and launch, with their lines;
    and what `paceline adapt` would do with it, or why not.

    PATH is a file or a folder: Python programs and notebooks, and the scripts and manifests that
    start them. Nothing is run. One program is shown in full, several in a row each.

    \b
    Examples:
      paceline scan train.py
      paceline scan .
      paceline scan src notebooks --all
      paceline scan . --json

    \b
    Exit codes:
      0  every file was read
      2  a path does not exist, or a file cannot be read (the others are listed)
    """
    from paceline.adapt.scan import scan_files, scanned_data
    from paceline.check.lint.judged import Unread
    from paceline.cli.standard_streams import reader_may_leave
    from paceline.record.source_files import read_sources
    from paceline.report.scan_text import format_scan

    sources = read_sources(paths, verb="scan")
    scanned = scan_files(sources.files, _bounded(timeout))
    unread = [Unread(path=path, line=None, what=what) for path, what in sources.troubles]
    unread += scanned.unread
    if not scanned.files and not unread:
        what = "neither a program nor a notebook"
        unread += [Unread(path=path, line=None, what=what) for path in sources.named]
    with reader_may_leave():
        for each in unread:
            show(f"{each} (not read)", err=True)
        if as_json:
            click.echo(json.dumps(scanned_data(scanned, unread), indent=2))
        else:
            details = shows_all or len(scanned.files) == 1
            for line in format_scan(scanned, len(unread), details=details):
                show(line)
    return 2 if unread else 0


def _bounded(total_s: float) -> Callable[[], AbstractContextManager[None]]:
    """Bound on the time of each file: its own limit, or what is left of the limit of all."""
    from paceline.adapt.scan import OutOfTime

    until = time.monotonic() + total_s

    @contextmanager
    def bounded() -> Iterator[None]:
        left = until - time.monotonic()
        is_last = left < _FILE_S
        what = (
            f"the {total_s:g} s of --timeout are over"
            if is_last
            else f"it takes over {_FILE_S:g} s"
        )

        def ring(number: int, frame: object) -> None:
            raise OutOfTime(what)

        if left <= 0:
            raise OutOfTime(what)
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, min(left, _FILE_S))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    return bounded
