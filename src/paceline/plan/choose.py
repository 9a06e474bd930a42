"""Choose one of the priced layouts.

The fastest layout that fits is the one whose slow end of the range is lowest. A simpler one within
the margin is taken instead (`SIMPLER`); one that fills the memory (`TIGHT`) only where nothing that
leaves room is faster. Of equally simple ones the fastest wins, and of equally fast ones the largest
micro-batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.choices.pipeline_schedules import SCHEDULE_FACTS
from paceline.estimate import Case, Estimate, price_one
from paceline.parallel import Layout, Layouts, Space
from paceline.parallel.table import code_of
from paceline.plan.search import Found, Priced, estimates_of, search

NUM_RUNNERS_UP = 8
SAME = 0.005
"""Times closer than this are called equal."""

SIMPLER = (
    "fewer kinds of splitting (tensor, pipeline, context, expert)",
    "no pipeline",
    "1F1B before other schedules",
    "fewer context ranks",
    "DDP before ZeRO-1, ZeRO-2, FSDP or ZeRO-3, and hybrid sharding",
    "no offload",
    "no recompute",
)
"""What makes a layout simpler, the first difference deciding: the order of `order_of`."""

TIGHT = 0.9
"""Share of what a rank may use from which on a layout fills the memory: of the published peaks a
quarter took a tenth more than was estimated (docs/concepts/estimates.md)."""

AXES = ("tensor", "pipeline", "context", "expert")
"""Ways to split besides data parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen layout and the others."""

    case: Case
    layout: Layout
    estimate: Estimate
    limit_bytes: int
    margin: float
    fitting: tuple[tuple[Layout, Estimate], ...]
    """Others that fit, best first: all, or the best of each way to split."""

    too_large: tuple[tuple[Layout, Estimate], ...]
    """Others that do not, least memory first."""

    is_whole: bool
    """Whether these are all there are."""

    fastest_alone: Layout | None
    """The fastest that fits and offloads nothing, where offloaded layouts were searched too."""

    leanest: Priced
    """The one that needs the least memory of each way to split, whether it fits or not."""

    best: Priced | None
    """The fastest that fits of each way to split; None where the space is small."""

    def least_bytes(self, sharding: str) -> float | None:
        """Bytes of a rank that the leanest layout with a sharding needs at the chosen tensor,
        pipeline, context and expert degrees; None where none was looked at."""
        sizes = self._beside(self.leanest, sharding).memory_bytes
        return float(sizes.min()) if sizes.size else None

    def best_with(self, sharding: str) -> Layout | None:
        """The fastest layout that fits with a sharding at the chosen degrees; None where none
        does."""
        found = None if self.best is None else self._beside(self.best, sharding)
        return found.fastest() if found else None

    def _beside(self, priced: Priced, sharding: str) -> Priced:
        t = priced.layouts
        same = t.sharding == code_of("sharding", sharding)
        for name in AXES:
            same = same & (getattr(t, name) == getattr(self.layout, name))
        return priced.take(np.broadcast_to(same, len(priced)))


def best_of(space: Space, case: Case, *, limit_bytes: int, margin: float) -> Choice | None:
    """What `choose` takes of a space that is searched for it."""
    found = search(space, case, limit_bytes=limit_bytes, margin=margin)
    return choose(found, case, limit_bytes=limit_bytes, margin=margin)


def choose(found: Found, case: Case, *, limit_bytes: int, margin: float) -> Choice | None:
    """The fastest layout that fits, or a simpler one within the margin; None when nothing fits."""
    if found.near is None:
        return None
    latest_s = float(found.near.step_s.min()) * (1 + margin)
    row = int(order_of(found.near, latest_s, limit_bytes)[0])
    layout = found.near.layouts.row(row)
    fitting, too_large = _others(found, case, layout, limit_bytes, latest_s)
    return Choice(
        case=case,
        layout=layout,
        estimate=price_one(layout, case),
        limit_bytes=limit_bytes,
        margin=margin,
        fitting=tuple(fitting),
        too_large=tuple(too_large),
        is_whole=found.all is not None,
        fastest_alone=found.fastest_alone,
        leanest=found.leanest,
        best=found.best,
    )


def order_of(priced: Priced, latest_s: float, limit_bytes: float) -> Any:
    """Row numbers, best first: those within the margin by simplicity, then the others by time. One
    that fills the memory, and is slower than one which leaves room, is among the others."""
    t, size = priced.layouts, len(priced)
    axes = sum((getattr(t, name) > 1) * 1 for name in AXES)
    places = np.zeros(len(SCHEDULE_FACTS), dtype=int)
    for place, word in enumerate(SCHEDULE_FACTS):
        places[code_of("schedule", word)] = place
    is_tight = priced.memory_bytes > TIGHT * limit_bytes
    roomy_s = float(priced.step_s[~is_tight].min(initial=latest_s))
    is_late = priced.step_s > np.where(is_tight, roomy_s, latest_s)
    # Time in steps of half a percent, so that equally fast layouts are equal.
    fastest = max(float(priced.step_s.min()), 1e-12)
    coarse = np.floor(np.log(np.maximum(priced.step_s, 1e-12) / fastest) / SAME + 1e-6)
    keys = (
        t.accumulation,
        coarse,
        t.reduce_every_micro_batch,
        t.recompute,
        t.offload_parameters,
        t.offload,
        t.sharding,
        t.context,
        np.where(t.pipeline > 1, places[np.broadcast_to(t.schedule, size)], 0),
        t.pipeline > 1,
        axes,
        np.where(is_late, coarse, 0),
        is_late,
    )
    return np.lexsort(tuple(np.broadcast_to(key, size) for key in keys))


def _others(
    found: Found, case: Case, chosen: Layout, limit_bytes: int, latest_s: float
) -> tuple[list[tuple[Layout, Estimate]], list[tuple[Layout, Estimate]]]:
    if found.all is not None:
        order = order_of(found.all, latest_s, limit_bytes)
        every = list(estimates_of(found.all.layouts.take(order), case))
        fitting = [p for p in every if p[1].memory.known_bytes <= limit_bytes and p[0] != chosen]
        too_large = [p for p in every if p[1].memory.known_bytes > limit_bytes]
        return fitting, sorted(too_large, key=lambda pair: pair[1].memory.known_bytes)
    assert found.best is not None
    fitting = list(estimates_of(_telling(found.best), case))
    fitting = [pair for pair in fitting if way_of(pair[0]) != way_of(chosen)]
    fits = {way_of(layout) for layout, _ in fitting}
    rows = np.flatnonzero(found.leanest.memory_bytes > limit_bytes)
    lean = found.leanest.take(rows) if rows.size else None
    too_large = [] if lean is None else list(estimates_of(_simplest(lean), case))
    return fitting, [pair for pair in too_large if way_of(pair[0]) not in fits]


def _telling(best: Priced) -> Layouts:
    """The fastest few, and the fastest of each kind of splitting: what `diverse` and the reasons
    look at."""
    order = np.argsort(best.step_s, kind="stable")
    t = best.layouts
    key = np.asarray(t.sharding) * 1
    for name in AXES:
        key = 2 * key + (getattr(t, name) > 1)
    _, firsts = np.unique(key[order], return_index=True)
    rows = np.unique(np.concatenate([np.arange(min(2 * NUM_RUNNERS_UP, len(order))), firsts]))
    return t.take(order[rows])


def _simplest(priced: Priced, most: int = 20) -> Layouts:
    return priced.layouts.take(order_of(priced, np.inf, np.inf)[:most])


def way_of(layout: Layout) -> tuple[object, ...]:
    """What makes two layouts different ways to split, and not neighbours."""
    return (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.sharding)
