"""Look at every layout: the fastest that fit, the best of each way to split, the leanest, and the
front of time against memory.

Exact: every possible cell of every grid is priced, in seconds and in bytes, by the same functions
as `estimate.price`; nothing is skipped on a guess. What makes it fast is that a grid's columns are
small (see `parallel.candidates`), so what depends on a few of them is worked out once.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from paceline.estimate import Case, Estimate, Prices, price
from paceline.estimate.estimate import case_holdings, case_terms
from paceline.estimate.memory import fullest_stages, memory_parts
from paceline.estimate.step import slow_end, total_of
from paceline.parallel import Layout, Layouts
from paceline.parallel.candidates import Grid, Space, grids
from paceline.parallel.table import join
from paceline.plan.host import over_host_bytes
from paceline.profile.block import Column

FEW = 48
"""A space of no more layouts than this is kept whole, each with why it lost."""

_MOST_NEAR = 20_000
"""Rows kept that are within the margin; more than a thousand are rare."""

_POOL_BYTES = 2**24
"""Size of an array that a search allocates and frees before anything else. glibc then keeps up to
twice as much freed memory for the next arrays (mallopt(3), M_MMAP_THRESHOLD, M_TRIM_THRESHOLD). By
default it returns the pages of each grid's columns to the kernel, which zeroes them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Some layouts of a search, as a plain table, with their prices."""

    layouts: Layouts
    step_s: Column
    """The slow end of the range; 0 where unknown."""

    memory_bytes: Column

    def __len__(self) -> int:
        return len(self.step_s)

    def fastest(self) -> Layout:
        """The fastest of them."""
        return self.layouts.row(int(self.step_s.argmin()))

    def take(self, rows: Any) -> "Priced":
        """Some of the rows, by number or by a mask."""
        rows = np.asarray(rows)
        return Priced(
            layouts=self.layouts.take(rows),
            step_s=self.step_s[rows],
            memory_bytes=self.memory_bytes[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found."""

    num_layouts: int
    """Priced."""

    num_fitting: int
    search_s: float

    near: Priced | None
    """Every layout that fits and is at most the margin slower than the fastest; None when nothing
    fits."""

    best: Priced | None
    """The fastest that fits of each way to split."""

    leanest: Priced
    """The one that needs the least memory of each way to split, whether it fits or not."""

    front: Priced | None
    """Those that fit and that none is both faster and leaner than; the fastest first."""

    all: Priced | None
    """The whole space, when it is small."""

    least_host_bytes: float | None = None
    """Least bytes of a node among the offloaded layouts that its host cannot hold; None when there
    is none. They are not among the others here."""

    fastest_alone: Layout | None = None
    """The fastest that fits on the accelerators alone, where offloaded ones were searched too."""


@dataclass(slots=True)
class _Best:
    """Rows by way to split: the lowest value of each, and the place it was found at."""

    rows: dict[tuple[int, ...], tuple[float, int, int]] = field(default_factory=dict)

    def add(self, key: tuple[int, ...], value: float, grid: int, cell: int) -> None:
        if key not in self.rows or value < self.rows[key][0]:
            self.rows[key] = (value, grid, cell)


def search(space: Space, case: Case, *, limit_bytes: float, margin: float) -> Found:
    """Price every layout of a space.

    Args:
        space: Where to look.
        case: Model, cluster and engine.
        limit_bytes: Of a rank.
        margin: Share of the fastest time that a simpler layout may be slower.
    """
    began = time.perf_counter()
    np.empty(_POOL_BYTES, np.uint8)
    kept: list[Grid] = []
    near: list[tuple[int, Column, Column, Column]] = []
    everything: list[tuple[int, Column, Column, Column]] = []
    fastest, leanest, front = _Best(), _Best(), _Front()
    best_s, num_layouts, num_fitting = np.inf, 0, 0
    least_host_bytes = np.inf
    for number, grid in enumerate(grids(space)):
        kept.append(grid)
        possible = grid.is_possible
        over = over_host_bytes(grid.layouts, case)
        if over is not None:
            over_bytes = np.where(possible, np.broadcast_to(over, possible.shape), np.inf)
            least_host_bytes = min(least_host_bytes, float(over_bytes.min()))
            possible = possible & ~np.isfinite(over_bytes)
        memory = np.where(possible, grid_bytes(grid.layouts, case), np.inf)
        fits = memory <= limit_bytes
        # No seconds are needed where nothing of a grid fits: four fifths of 405B's layouts.
        step = np.where(fits, grid_seconds(grid.layouts, case) if fits.any() else np.inf, np.inf)
        count = int(np.count_nonzero(possible))
        if not count:
            continue
        num_layouts += count
        num_fitting += int(np.count_nonzero(fits))
        _note_ways(grid, number, step, memory, fastest, leanest)
        if num_layouts <= FEW:
            everything.append((number, *_cells(possible, step, memory)))
        lowest = float(step.min())
        if not np.isfinite(lowest):
            continue
        best_s = min(best_s, lowest)
        near.append((number, *_cells(step <= best_s * (1 + margin), step, memory)))
        front.add(number, step, memory)
    return Found(
        num_layouts=num_layouts,
        num_fitting=num_fitting,
        search_s=time.perf_counter() - began,
        near=_near(kept, near, best_s * (1 + margin)),
        best=_rows_of(kept, fastest, case),
        leanest=_leanest(kept, leanest, case),
        front=front.priced(kept),
        all=_join(kept, everything) if 0 < num_layouts <= FEW else None,
        least_host_bytes=least_host_bytes if np.isfinite(least_host_bytes) else None,
    )


def grid_seconds(layouts: Layouts, case: Case) -> Column:
    """The slow end of a step's seconds for every cell of a grid: the total of `price` on
    `layouts.take(...)`."""
    return np.broadcast_to(slow_end(case_terms(layouts, case)), layouts.shape)


def grid_bytes(layouts: Layouts, case: Case) -> Column:
    """Bytes of the fullest rank for every cell of a grid: the total of `price`."""
    holdings = case_holdings(layouts, case)
    stages = memory_parts(case.model, layouts, holdings, fullest_stages(layouts))
    memory = reduce(np.maximum, (total_of(parts.values()) for parts in stages))
    return np.broadcast_to(memory, layouts.shape)


def _note_ways(
    grid: Grid, number: int, step: Column, memory: Column, fastest: _Best, leanest: _Best
) -> None:
    """The best of each way to split: of each context degree, expert degree and sharding."""
    t = grid.layouts
    contexts, experts, kinds = t.context[:, 0, 0, 0], t.expert[:, 0, 0, 0], t.sharding[0, 0, 0]
    ways = [
        (context, expert, np.flatnonzero((contexts == context) & (experts == expert)))
        for context, expert in sorted(set(zip(contexts.tolist(), experts.tolist(), strict=True)))
    ]
    places = [(kind, np.flatnonzero(kinds == kind)) for kind in sorted(set(kinds.tolist()))]
    for values, best in ((step, fastest), (memory, leanest)):
        least = values.min(axis=1).min(axis=1)
        for context, expert, rows in ways:
            lines = least[rows].min(axis=0)
            for kind, columns in places:
                column = int(columns[lines[columns].argmin()])
                if not np.isfinite(lines[column]):
                    continue
                row = int(rows[least[rows, column].argmin()])
                order, again = divmod(int(values[row, :, :, column].argmin()), values.shape[2])
                cell = int(np.ravel_multi_index((row, order, again, column), values.shape))
                key = (int(t.tensor.flat[0]), int(t.pipeline.flat[0]), context, expert, kind)
                best.add(key, float(lines[column]), number, cell)


def _cells(mask: Column, step: Column, memory: Column) -> tuple[Column, Column, Column]:
    cells = np.flatnonzero(mask)
    return cells, step.ravel()[cells], memory.ravel()[cells]


def _near(
    kept: list[Grid], near: list[tuple[int, Column, Column, Column]], latest_s: float
) -> Priced | None:
    """Layouts that were near when they were found and still are."""
    still = []
    for number, cells, step, memory in near:
        rows = np.flatnonzero(step <= latest_s)
        if rows.size > _MOST_NEAR:
            rows = rows[np.argsort(step[rows], kind="stable")[:_MOST_NEAR]]
        if rows.size:
            still.append((number, cells[rows], step[rows], memory[rows]))
    return _join(kept, still) if still else None


def _join(kept: list[Grid], parts: list[tuple[int, Column, Column, Column]]) -> Priced:
    return Priced(
        layouts=join([kept[number].layouts.take(cells) for number, cells, _, _ in parts]),
        step_s=np.concatenate([step for _, _, step, _ in parts]),
        memory_bytes=np.concatenate([memory for _, _, _, memory in parts]),
    )


def _rows_of(kept: list[Grid], best: _Best, case: Case) -> Priced | None:
    if not best.rows:
        return None
    places = np.array([(grid, cell) for _, grid, cell in best.rows.values()])
    return _again(_taken(kept, places[:, 0], places[:, 1]), case)


def _taken(kept: list[Grid], numbers: Column, cells: Column) -> Layouts:
    """Cells of several grids as one table, in the order of the grids."""
    return join(
        [kept[number].layouts.take(cells[numbers == number]) for number in np.unique(numbers)]
    )


def _leanest(kept: list[Grid], best: _Best, case: Case) -> Priced:
    found = _rows_of(kept, best, case)
    return found if found is not None else _again(Layouts(**_NOTHING), case)


def _again(layouts: Layouts, case: Case) -> Priced:
    """Few layouts priced as a table: both bytes and seconds, whether they fit or not."""
    if not len(layouts):
        nothing = np.zeros(0)
        return Priced(layouts=layouts, step_s=nothing, memory_bytes=nothing)
    prices = price(layouts, case)
    step: Any = slow_end(prices.terms) if prices.terms else 0.0
    size = len(layouts)
    return Priced(
        layouts=layouts,
        step_s=np.broadcast_to(step, size),
        memory_bytes=np.broadcast_to(prices.memory_bytes, size),
    )


_NOTHING: dict[str, Column] = {
    name: np.zeros(0, dtype=np.int64) for name in Layouts.__dataclass_fields__
}


class _Front:
    """Time against memory: what no other layout beats in both."""

    def __init__(self) -> None:
        self._step = np.zeros(0)
        self._memory = np.zeros(0)
        self._grid = np.zeros(0, dtype=np.int64)
        self._cell = np.zeros(0, dtype=np.int64)

    def add(self, number: int, step: Column, memory: Column) -> None:
        """The cells of one grid; infinite ones do not fit."""
        flat_s, flat_b = step.ravel(), memory.ravel()
        cells = np.flatnonzero(flat_s < np.inf)
        if self._step.size:
            place = np.searchsorted(self._step, flat_s[cells], side="right") - 1
            beaten = (place >= 0) & (self._memory[np.maximum(place, 0)] <= flat_b[cells])
            cells = cells[~beaten]
        if not cells.size:
            return
        steps = np.concatenate([self._step, flat_s[cells]])
        sizes = np.concatenate([self._memory, flat_b[cells]])
        order = np.lexsort((sizes, steps))
        least = np.minimum.accumulate(sizes[order])
        is_new = np.ones(len(order), dtype=bool)
        is_new[1:] = sizes[order][1:] < least[:-1]
        keep = order[is_new]
        grid = np.concatenate([self._grid, np.full(cells.size, number)])
        cell = np.concatenate([self._cell, cells])
        self._step, self._memory = steps[keep], sizes[keep]
        self._grid, self._cell = grid[keep], cell[keep]

    def priced(self, kept: list[Grid]) -> Priced | None:
        """The front as a table."""
        if not self._step.size:
            return None
        order = np.argsort(self._grid, kind="stable")
        table = Priced(
            layouts=_taken(kept, self._grid[order], self._cell[order]),
            step_s=self._step[order],
            memory_bytes=self._memory[order],
        )
        return table.take(np.argsort(table.step_s, kind="stable"))


def fastest(
    space: Space, case: Case, *, limit_bytes: float, count: int
) -> list[tuple[Layout, Estimate]]:
    """The `count` fastest layouts that fit, the fastest first."""
    best: Priced | None = None
    for grid in grids(space):
        memory = grid_bytes(grid.layouts, case)
        fits = grid.is_possible & (memory <= limit_bytes)
        over = over_host_bytes(grid.layouts, case)
        cells = np.flatnonzero(fits if over is None else fits & ~np.isfinite(over))
        if not cells.size:
            continue
        steps = grid_seconds(grid.layouts, case).ravel()[cells]
        if cells.size > count:
            part = np.argpartition(steps, count)[:count]
            cells, steps = cells[part], steps[part]
        table, sizes = grid.layouts.take(cells), memory.ravel()[cells]
        if best is not None:
            table = join([best.layouts, table])
            steps = np.concatenate([best.step_s, steps])
            sizes = np.concatenate([best.memory_bytes, sizes])
        best = Priced(layouts=table, step_s=steps, memory_bytes=sizes)
        best = best.take(np.argsort(steps, kind="stable")[:count])
    return [] if best is None else list(estimates_of(best.layouts, case))


def estimates_of(layouts: Layouts, case: Case) -> Iterator[tuple[Layout, Estimate]]:
    """Layouts and estimates of a small table, as objects."""
    prices: Prices = price(layouts, case)
    for index in range(len(layouts)):
        yield layouts.row(index), prices.row(index)
