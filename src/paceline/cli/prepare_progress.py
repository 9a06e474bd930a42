"""How far the preparation of data is, and what they were read as, on standard error."""

import time
from typing import TYPE_CHECKING

import click

from paceline.cli.screen import Screen
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.prepare import Index, Report, Step, TrainedOn


def show_preparing() -> "Report":
    """Prints how far the preparation is; nothing where it takes no time."""
    screen, began = Screen(), time.monotonic()

    def show(step: "Step") -> None:
        took_s = time.monotonic() - began
        if screen.is_live_due():
            screen.live(
                f"preparing   {step.files_done}/{step.num_files} files  "
                f"{format_bytes(step.num_bytes)} of text  "
                f"{format_bytes(int(step.num_bytes / max(1e-9, took_s)))}/s  "
                f"{format_seconds(took_s)}"
            )
        if step.files_done == step.num_files:
            screen.end_live()

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
