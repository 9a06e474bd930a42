"""How far the preparation of data is, on standard error."""

import time
from typing import TYPE_CHECKING

from paceline.cli.screen import Screen
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.prepare import Report, Step


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
