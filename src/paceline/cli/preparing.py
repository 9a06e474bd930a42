"""What is shown while data are prepared: a live line in a terminal, else a line now and then; and
what they were read as."""

import sys
import time
from typing import TYPE_CHECKING

import click

from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.prepare import Index, Report, Step, TrainedOn

_LOG_EVERY_S, _LIVE_EVERY_S = 10.0, 0.2


def show_preparing() -> "Report":
    """Prints how far the preparation is, on standard error; nothing where it takes no time."""
    began = time.monotonic()
    shown = began
    is_live = sys.stderr.isatty()

    def show(step: "Step") -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < (_LIVE_EVERY_S if is_live else _LOG_EVERY_S):
            return
        shown = now
        speed = format_bytes(int(step.num_bytes / max(1e-9, now - began)))
        text = (
            f"preparing   {step.files_done}/{step.num_files} files  "
            f"{format_bytes(step.num_bytes)} of text  {speed}/s  {format_seconds(now - began)}"
        )
        click.echo(f"\r\x1b[2K{text}" if is_live else text, err=True, nl=not is_live)
        if is_live and step.files_done == step.num_files:
            click.echo("", err=True)

    return show


def show_read(data: "TrainedOn | None") -> None:
    """Prints what each source of prepared data was read as, on standard error."""
    from paceline.prepare import Prepared

    if isinstance(data, Prepared):
        for line in read_as(data.index):
            click.echo(line, err=True)


def read_as(index: "Index") -> "Iterator[str]":
    """What each source was read as, and which columns were not."""
    for name, found in index.settings.get("sources", {}).items():
        columns = ", ".join(f"{column}: {name_}" for column, name_ in found["columns"].items())
        yield (
            f"read        {name} as {found['kind']}"
            + (f" ({columns})" if columns else "")
            + (f"; not read: {', '.join(found['not_read'])}" if "not_read" in found else "")
        )
