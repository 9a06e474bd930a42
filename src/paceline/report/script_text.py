"""A script's profile as rows of text, for the screen and for its page."""

from collections.abc import Iterator

from paceline.check.script_profile import limits_of, verdict_of
from paceline.record.script_profile import Part, ScriptProfile
from paceline.report.table import format_table
from paceline.units import counted, format_bytes, format_seconds

Row = tuple[str, str, str, str, str]

_SHOWN = 8
"""Operators in the table."""


def profile_rows(profile: ScriptProfile) -> Iterator[Row]:
    """Head and rows: what, host time a step, its share, device time a step, calls a step."""
    if not profile.steps:
        yield (f"not measured: only {counted(profile.after, 'optimizer step')}", "", "", "", "")
        return
    measured = f"{counted(profile.steps, 'step')} of rank 0, after {profile.after}"
    yield (measured, "host", "share", "device", "calls")
    yield ("a step", format_seconds(profile.step_s), "100%", "", "")
    for part in profile.phases:
        yield _row(part.name, part, profile.step_s)
    for part in profile.communication:
        yield _row(f"{part.name} (beside the phases)", part, profile.step_s)
    for part in profile.operators[:_SHOWN]:
        yield _row(f"operator {part.name}", part, profile.step_s)


def advice_lines(profile: ScriptProfile) -> Iterator[str]:
    """What limits the step, use and memory, and then what helps, the most first."""
    if not profile.steps:
        return
    busy = "" if profile.busy is None else f"; the accelerator computes {profile.busy:.0%} of it"
    held = "" if profile.peak_bytes is None else f"; {format_bytes(profile.peak_bytes)} at the peak"
    yield f"{verdict_of(profile)}{busy}{held}"
    for number, limit in enumerate(limits_of(profile), start=1):
        yield f"{number}. {limit.name}, up to {limit.share:.0%} of a step: {limit.change}"


def profile_lines(profile: ScriptProfile) -> Iterator[str]:
    """Lines of a profile for a terminal, with aligned columns, and the advice after them."""
    yield from format_table(list(profile_rows(profile))).splitlines()
    yield from advice_lines(profile)


def _row(name: str, part: Part, step_s: float) -> Row:
    device = "" if part.device_s is None else format_seconds(part.device_s)
    calls = "" if part.calls is None else f"{part.calls:g}"
    return (name[:60], format_seconds(part.seconds), f"{part.seconds / step_s:.0%}", device, calls)
