"""Many layouts at once: one row a layout, columns are arrays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal, get_args

import numpy as np

from paceline.choices import ContextKind, Offload, Recompute, Schedule, Sharding
from paceline.parallel.layout import Layout
from paceline.profile.block import Column

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
OFFLOADS: tuple[Offload, ...] = get_args(Offload)

WORDS: dict[str, tuple[str, ...]] = {
    "sharding": SHARDINGS,
    "schedule": SCHEDULES,
    "context_kind": CONTEXT_KINDS,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
}
"""Columns of words are kept as places in these tuples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """A table of layouts. Every column has as many entries as the table has rows, or one for all.

    Fields are those of `Layout`; words are places in `SHARDINGS`, `SCHEDULES` and so on, and
    `shard` is always a number: the ranks that share one copy of the optimizer state.

    A table may also be a grid: columns of several dims that broadcast against each other, so that
    arithmetic on a few columns is done once for all rows that share them. Its rows are then the
    grid's cells, in the order of its memory.
    """

    data: Column
    sharding: Column
    shard: Column
    micro_batch: Column
    accumulation: Column
    reduce_every_micro_batch: Column
    tensor: Column
    sequence_parallel: Column
    pipeline: Column
    schedule: Column
    chunks: Column
    context: Column
    context_kind: Column
    expert: Column
    recompute: Column
    recompute_every: Column
    offload: Column
    offload_parameters: Column

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the grid; one number for a plain table."""
        shapes = {getattr(self, name).shape for name in Layouts.__slots__}
        return (shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)) or (1,)

    def __len__(self) -> int:
        return prod(self.shape)

    def row(self, index: int) -> Layout:
        """One layout of the table."""
        columns = {name: getattr(self, name) for name in Layouts.__slots__}
        if all(column.ndim <= 1 for column in columns.values()):
            values = {
                name: column.item(index if column.size > 1 else 0)
                for name, column in columns.items()
            }
        else:
            shape = self.shape
            values = {
                name: np.broadcast_to(column, shape).flat[index].item()
                for name, column in columns.items()
            }
        words = {name: known[values[name]] for name, known in WORDS.items()}
        is_hybrid = words["sharding"] == "hybrid"
        return Layout(**(values | words | {"shard": values["shard"] if is_hybrid else None}))

    def take(self, rows: np.ndarray) -> "Layouts":
        """Some of the rows, as a plain table: by number, or by a mask of the table's shape."""
        shape = self.shape
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        places = np.unravel_index(rows, shape)
        taken = {e.name: _taken(np.asarray(getattr(self, e.name)), places) for e in fields(self)}
        return Layouts(**taken)

    def num_ranks(self) -> Column:
        """Ranks of each layout."""
        return self.data * self.tensor * self.pipeline * self.context

    def keeps_shards(self) -> Column:
        """Where parameters are kept as shards, by `Layout.keeps_shards`."""
        return (self.sharding > 0) & ((self.shard > 1) | (self.offload > 0))


def _taken(column: np.ndarray, places: tuple[np.ndarray, ...]) -> np.ndarray:
    """A column's entries at places of the table, along the dims that it has itself."""
    if column.size == 1:
        return np.full(len(places[0]), column.item(), column.dtype)
    own = places[len(places) - column.ndim :]
    index = tuple(at if size > 1 else 0 for at, size in zip(own, column.shape, strict=True))
    return np.asarray(column[index])


def table_of(layouts: Sequence[Layout]) -> Layouts:
    """The table with these layouts as its rows.

    >>> rows = [Layout(data=8, sharding="full", micro_batch=2, accumulation=1)]
    >>> table_of(rows).row(0) == rows[0]
    True
    """
    columns: dict[str, Column] = {}
    for each in fields(Layouts):
        values: Iterable[Any] = (getattr(layout, each.name) for layout in layouts)
        if each.name in WORDS:
            values = (WORDS[each.name].index(value) for value in values)
        elif each.name == "shard":
            values = (layout.shard_degree for layout in layouts)
        columns[each.name] = np.array(list(values))
    return Layouts(**columns)


def join(tables: Sequence[Layouts]) -> Layouts:
    """All rows of all plain tables, in order."""
    sizes = [len(table) for table in tables]
    columns = {
        each.name: np.concatenate(
            [
                column if column.shape == (size,) else np.broadcast_to(column, size)
                for column, size in zip(
                    (getattr(table, each.name) for table in tables), sizes, strict=True
                )
            ]
        )
        for each in fields(Layouts)
    }
    return Layouts(**columns)


def code_of(
    kind: Literal["sharding", "schedule", "context_kind", "recompute", "offload"], word: str
) -> int:
    """Place of a word in its column, such as 3 for sharding `full`."""
    return WORDS[kind].index(word)


def distinct(table: Layouts, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that differ in some columns: one row number for each combination that occurs, and for
    every row the place of its combination among them.

    Columns hold small whole numbers, so that counting is faster than sorting. Of a grid, the places
    have only the dims that these columns have.

    >>> rows = [Layout(data=d, sharding="none", micro_batch=m, accumulation=1)
    ...     for d in (1, 2) for m in (4, 8)]
    >>> [each.tolist() for each in distinct(table_of(rows), ["micro_batch"])]
    [[0, 1], [0, 1, 0, 1]]
    """
    whole = table.shape
    columns = [np.asarray(getattr(table, name)) for name in names]
    shape = np.broadcast_shapes(*(column.shape for column in columns))
    if len(whole) == 1:
        shape = whole
    key = np.zeros(shape, dtype=np.int64)
    count = 1
    for column in columns:
        codes, number = _codes(np.broadcast_to(column, shape).astype(np.int64))
        key, count = key * number + codes, count * number
    places, number = _codes(key)
    flat = places.ravel()
    first = np.zeros(number, dtype=np.int64)
    first[flat[::-1]] = np.arange(flat.size - 1, -1, -1)
    if shape != whole:
        lead = (1,) * (len(whole) - len(shape)) + shape
        first = np.ravel_multi_index(np.unravel_index(first, lead), whole)
    return first, places


_MAX_COUNTED = 2**24


def _codes(column: np.ndarray) -> tuple[np.ndarray, int]:
    """Each value's place among those that occur, and how many occur."""
    if column.size == 0:
        return column, 0
    top = int(column.max())
    if top >= _MAX_COUNTED:
        values, places = np.unique(column, return_inverse=True)
        return places.reshape(column.shape), len(values)
    seen = np.zeros(top + 1, dtype=bool)
    seen[column] = True
    places = np.cumsum(seen) - 1
    return places[column], int(places[-1]) + 1
