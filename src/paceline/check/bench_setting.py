"""What a sweep over the values of one setting says: which is the fastest, if they can be told
apart."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from paceline.check.bench_row import caution_of, row_of
from paceline.record.bench import Measured
from paceline.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of the setting, measured. Seconds of a step."""

    value: str
    step_s: float
    step_low_s: float
    step_high_s: float
    num_steps: int
    median_s: tuple[float, float] | None
    """95 % interval of `step_s`; None of too few steps."""

    exposed_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A sweep and its result."""

    field: str
    num_ranks: int
    rows: tuple[Setting, ...]
    fastest: str
    """The value with the shortest median step."""

    is_clear: bool
    """Whether it is faster than every other value beyond the noise."""

    sentence: str
    caution: str | None
    """Why the numbers are not to be trusted much."""


def judge_settings(
    field: str,
    values: Sequence[str],
    measured: Sequence[Measured],
    again: Sequence[Measured] | None = None,
) -> Settings:
    """The fastest of some values of one field.

    Args:
        measured: For each value, on as many ranks.
        again: The same in another order: a machine that became slower meanwhile made the value that
            came last look slow, and the two rounds then disagree.
    """
    rounds = [measured] if again is None else [measured, again]
    rows = tuple(map(_setting, values, map(_pooled, *rounds)))
    best = min(rows, key=lambda row: row.step_s)
    each = [[_setting(*pair).step_s for pair in zip(values, one, strict=True)] for one in rounds]
    first = rows.index(best)
    alike = [
        row
        for index, row in enumerate(rows)
        if row is not best
        and (not _is_slower(row, best) or any(one[index] <= one[first] for one in each))
    ]
    slowest = max(rows, key=lambda row: row.step_s)
    less = 1 - best.step_s / slowest.step_s
    sentence = (
        f"{field}={best.value} is the fastest: {format_seconds(best.step_s)} a step, {less:.0%} "
        f"less than {slowest.value}; the medians' 95 % intervals do not overlap, in both rounds"
    )
    if alike:
        others = ", ".join(f"{row.value} ({interval_text(row)})" for row in alike)
        sentence = (
            f"no verdict: {field}={best.value} ({interval_text(best)}) is not told apart from "
            f"{others}: the medians' 95 % intervals overlap, or the two rounds disagree; take more "
            "--steps on a quiet machine"
        )
    return Settings(
        field=field,
        num_ranks=measured[0].num_ranks,
        rows=rows,
        fastest=best.value,
        is_clear=not alike,
        sentence=sentence,
        caution=caution_of(
            {f"{field}={row.value}": row.step_high_s / row.step_low_s for row in rows}
        ),
    )


def interval_text(row: Setting) -> str:
    """The median's 95 % interval, and of how many steps."""
    if row.median_s is None:
        return f"n {row.num_steps}: too few for an interval"
    low, high = map(format_seconds, row.median_s)
    return f"{low} to {high}, n {row.num_steps}"


def _pooled(*rounds: Measured) -> Measured:
    """The steps of all rounds, and the rest as in the first."""
    ranks = [
        replace(of_rank[0], step_s=tuple(chain(*(rank.step_s for rank in of_rank))))
        for of_rank in zip(*(each.ranks for each in rounds), strict=True)
    ]
    return replace(rounds[0], ranks=tuple(ranks))


def _setting(value: str, measured: Measured) -> Setting:
    row = row_of(measured, None)
    return Setting(
        value=value,
        step_s=row.step_s,
        step_low_s=row.step_low_s,
        step_high_s=row.step_high_s,
        num_steps=row.num_steps,
        median_s=row.median_s,
        exposed_s=row.exposed_s,
    )


def _is_slower(row: Setting, best: Setting) -> bool:
    """Whether the intervals of the medians lie apart."""
    if row.median_s is None or best.median_s is None:
        return False
    return best.median_s[1] < row.median_s[0]
