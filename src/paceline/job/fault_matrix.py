"""The fault matrix: what can go wrong, and how a drill makes it go wrong. One row, one line.

Its source is a survey of what published systems recover from and what breaks in practice; the row
numbers are those of the design page, so that figures and tests can name them.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from paceline.job.section import shipped

Needs = Literal["root", "spares", "nodes", "checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the matrix."""

    number: int
    title: str
    faults: tuple[str, ...] = ()
    """Examples that `--fault` takes, for two ranks; empty when a drill cannot make it."""

    elsewhere: str = ""
    """What proves it instead, where it is no drill's."""

    skipped: str = ""
    """Why nothing here can make it."""

    needs: tuple[Needs, ...] = ()


MATRIX: tuple[Row, ...] = tuple(
    msgspec.convert({**row, "number": int(number)}, Row)
    for number, row in shipped("faults.toml")["matrix"].items()
)
"""Every row, from `faults.toml`."""


def rows_of(kind: str) -> tuple[int, ...]:
    """Numbers of the rows that a kind of fault stands for.

    >>> rows_of("agent")
    (7,)
    """
    return tuple(
        row.number for row in MATRIX if any(text.split()[0] == kind for text in row.faults)
    )
