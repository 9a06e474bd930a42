"""Every layout that a job leaves possible."""

from collections.abc import Iterator
from math import isqrt

from paceline.parallel.layout import Layout, Sharding
from paceline.spec import LayoutSpec


def candidates(global_batch: int, num_ranks: int, fixed: LayoutSpec) -> list[Layout]:
    """Every sharding x micro-batch x way to reduce, with what the job fixed held fixed.

    The batch of a rank is divided into micro-batches of equal size; what does not divide is a
    matter for `check_layout_choices`, and gives no candidates here. One rank has nothing to
    share, so sharding and reducing make no difference there.

    >>> [layout.micro_batch for layout in candidates(8, 2, LayoutSpec(sharding="none"))]
    [4, 2, 1]
    """
    if global_batch % num_ranks:
        return []
    return [
        layout
        for sharding in _shardings(num_ranks, fixed)
        for micro_batch in _micro_batches(global_batch // num_ranks, fixed)
        for layout in _layouts(global_batch, num_ranks, sharding, micro_batch)
    ]


def divisors(number: int) -> list[int]:
    """Every divisor, largest first.

    >>> divisors(12)
    [12, 6, 4, 3, 2, 1]
    """
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)}, reverse=True)


def _shardings(num_ranks: int, fixed: LayoutSpec) -> tuple[Sharding, ...]:
    if fixed.sharding != "auto":
        return (fixed.sharding,)
    return ("none", "full") if num_ranks > 1 else ("none",)


def _micro_batches(rank_batch: int, fixed: LayoutSpec) -> list[int]:
    if fixed.micro_batch == "auto":
        return divisors(rank_batch)
    return [fixed.micro_batch] if rank_batch % fixed.micro_batch == 0 else []


def _layouts(
    global_batch: int, num_ranks: int, sharding: Sharding, micro_batch: int
) -> Iterator[Layout]:
    accumulation = global_batch // (num_ranks * micro_batch)
    can_reduce_each = sharding == "full" and accumulation > 1 and num_ranks > 1
    for reduce_every_micro_batch in (False, True) if can_reduce_each else (False,):
        yield Layout(
            data=num_ranks,
            sharding=sharding,
            micro_batch=micro_batch,
            accumulation=accumulation,
            reduce_every_micro_batch=reduce_every_micro_batch,
        )
