"""Runs as tables for people: a list of them, and some beside each other."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.record.compare import Bits, Comparison, Curve, Sameness, Values
from paceline.record.run_row import RunRow
from paceline.record.sanitize import plain
from paceline.report.table import not_shown
from paceline.units import counted, format_bytes, format_count, format_seconds

COLUMNS = (
    *("run", "state", "step", "loss", "eval_loss", "created_at"),
    *("tokens_per_s", "restarts", "exactness", "layout"),
)
"""Fields that are listed unless others are asked for; a narrow terminal lacks the last."""

_MOST_VALUE = 40
"""Characters of a value in a comparison."""

_BEFORE = 8
"""Characters shown before the first that differs, of `_MOST_VALUE`."""

_TABLE_CURVES = ("train/loss", "eval/loss")


def list_lines(
    rows: Sequence[RunRow],
    columns: Sequence[str],
    get: Callable[[RunRow, str], Any],
    *,
    width: int | None,
) -> Iterator[str]:
    """A line for each run, under a head with the names of the fields.

    Args:
        columns: Fields and settings.
        get: Value of a field or setting of a run.
        width: Leave out columns, from the last, that do not fit into so many characters; None is
            all of them.
    """
    table = [[name.upper() for name in columns]]
    table += [[_cell(name, get(row, name), row) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    count = len(columns)
    while width is not None and count > 1 and sum(widths[:count]) + 2 * (count - 1) > width:
        count -= 1
    for line in table:
        yield "  ".join(map(str.ljust, line[:count], widths)).rstrip()
    if hidden := table[0][count:]:
        yield not_shown(hidden)
    for row in rows:
        if row.damage is not None:
            yield f"{row.run}: {row.damage}"


def comparison_lines(found: Comparison, *, all_settings: bool) -> Iterator[str]:
    """Runs beside each other: how they differ, what came of them, their losses, their bits."""
    letters = [chr(ord("A") + i) if i < 26 else f"run{i + 1}" for i in range(len(found.runs))]
    for letter, row in zip(letters, found.runs, strict=True):
        yield f"{letter}  {row.run}  {row.state}, step {_cell('step', row.step, row)}"
        if row.damage is not None:
            yield f"   {row.damage}"
    yield ""
    same = f"{counted(found.num_same_settings, 'setting')} the same"
    title = "job settings" if all_settings else "job settings that differ"
    yield from _section(f"{title} ({same})", found.settings, letters)
    yield from _section("plan, where it differs", found.plan, letters)
    yield from _section("code, where it differs", found.code, letters)
    yield from _section("measured", found.measured, letters)
    for curve in found.curves:
        if curve.name in _TABLE_CURVES:
            yield from _section(f"{curve.name}, mean up to each step", _by_step(curve), letters)
    for letter, bits in zip(letters[1:], found.bits, strict=True):
        yield f"bits of {letter} against A: {_bits(bits)}"


def _section(title: str, values: Sequence[Values], letters: Sequence[str]) -> Iterator[str]:
    if not values:
        yield f"{title}: none"
        yield ""
        return
    table = [["", *letters]]
    table += [[f"  {one.name}", *_short(one)] for one in values]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    widths[0] = max(widths[0], len(title))
    table[0][0] = title
    for line in table:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()
    yield ""


def _by_step(curve: Curve) -> list[Values]:
    return [
        Values(name=f"step {step:,}", values=tuple(run[i] for run in curve.mean))
        for i, step in enumerate(curve.steps)
    ]


def _bits(bits: Bits) -> str:
    parts = [
        _same("samples", bits.samples),
        _same("losses", bits.losses),
        _same("state", bits.state),
    ]
    if bits.losses.is_same is False and bits.largest_loss_difference is not None:
        parts[1] += f" (by up to {bits.largest_loss_difference:.2g} of their value)"
    return "; ".join(parts)


def _same(what: str, found: Sameness) -> str:
    if found.is_same is None:
        return f"{what} unknown (no step at which both recorded them)"
    steps = counted(found.num_steps, "shared step")
    if found.is_same:
        return f"{what} equal at {steps}"
    return f"{what} differ from step {found.first_difference:,} on, of {steps}"


def _short(one: Values) -> list[str]:
    """The values in few characters: of long ones from where they begin to differ."""
    name = one.name.removeprefix("estimate.").removeprefix("cluster.")
    texts = [_cell(name, value, None) for value in one.values]
    columns = enumerate(zip(*texts, strict=False))
    start = next((at for at, signs in columns if len(set(signs)) > 1), 0) - _BEFORE
    if start > 0 and max(map(len, texts)) > _MOST_VALUE:
        texts = [f"...{text[start:]}" for text in texts]
    return [text if len(text) <= _MOST_VALUE else f"{text[: _MOST_VALUE - 3]}..." for text in texts]


def _cell(name: str, value: Any, row: RunRow | None) -> str:
    """A value in the unit that its name has."""
    if value is None:
        return "-"
    if name == "step" and row is not None:
        return f"{row.step}/{row.num_steps}" if row.num_steps else str(row.step)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and "." not in name:
        return _number(name, value)
    if name in ("commit", "diff", "state_digest"):
        return str(value)[:12]
    return plain(value) if isinstance(value, str) else json.dumps(value)


def _number(name: str, value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if name.endswith("_at"):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_per_s"):
        return format_count(value)
    if name.endswith("_s"):
        return format_seconds(value)
    if name.startswith("usd"):
        return f"${value:,.2f}"
    if name == "mfu":
        return f"{value:.1%}"
    return (
        str(value)
        if isinstance(value, int)
        else f"{value:.4g}"
        if abs(value) >= 1e4
        else f"{value:.4f}"
    )
