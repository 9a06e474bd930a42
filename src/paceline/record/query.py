"""The runs that are asked for: some of a folder's, in some order, with some of their fields."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import JobError, did_you_mean
from paceline.record.registry import Listing, list_runs
from paceline.record.run_filter import FIELDS, Where, as_text, read_where
from paceline.record.run_row import RunRow


@dataclass(frozen=True, slots=True)
class Found:
    """Runs and what is known of them."""

    rows: list[RunRow]
    listing: Listing

    def value(self, row: RunRow, name: str) -> Any:
        """A field of a run, or a setting of its job; None where it is unknown."""
        if name in FIELDS:
            return getattr(row, name)
        return self.listing.settings.get(row.run, {}).get(name)


def find_runs(
    runs: Path,
    *,
    where: str | None = None,
    sort: str = "created_at",
    columns: Sequence[str] = (),
    last: int | None = None,
) -> Found:
    """The runs of a folder that are asked for.

    Args:
        sort: Fields to order them by, separated by commas; a dash before one is from high to low.
        last: How many, from the end; None is all.

    Raises:
        JobError: `R070`, the expression cannot be read; `R071`, a name is not known.
    """
    wanted = read_where(where) if where is not None else Where(lambda get: True, {})
    order = [word.strip() for word in sort.split(",") if word.strip()]
    names = {name.removeprefix("-"): "--sort" for name in order}
    names |= {**dict.fromkeys(columns, "--columns"), **wanted.names}
    listing = list_runs(runs, settings=any(name not in FIELDS for name in names))
    if listing.rows:
        _check_names(names, {key for job in listing.settings.values() for key in job})
    found = Found([], listing)
    rows = [row for row in listing.rows if wanted.holds(lambda name: found.value(row, name))]  # noqa: B023
    for name in reversed(order):
        rows = _ordered(rows, found, name)
    return Found(rows[-last:] if last is not None else rows, listing)


def _ordered(rows: list[RunRow], found: Found, name: str) -> list[RunRow]:
    """Rows by a field; those where it is unknown come last, whatever the direction."""
    falls, name = name.startswith("-"), name.removeprefix("-")
    known = [row for row in rows if found.value(row, name) is not None]
    known.sort(key=lambda row: _sort_key(found.value(row, name)), reverse=falls)
    return known + [row for row in rows if found.value(row, name) is None]


def _sort_key(value: Any) -> tuple[int, float, str]:
    """Numbers before texts, each in their order."""
    if isinstance(value, int | float):
        return (0, float(value), "")
    return (1, 0.0, as_text(value))


def _check_names(names: Mapping[str, str], settings: Collection[str]) -> None:
    """Every name is a field of a run or a setting of some job; else all fields are named."""
    for name, where in names.items():
        if name in FIELDS or name in settings:
            continue
        meant = did_you_mean(name, [*FIELDS, *settings])
        raise JobError.of(
            code="R071",
            what=f"runs have no field `{name}`, and no job here has such a setting",
            where=where,
            fix=f"{meant} Fields: {', '.join(FIELDS)}; or a setting of the job, such as "
            "train.learning_rate".lstrip(),
        )
