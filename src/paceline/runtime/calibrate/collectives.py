"""All-reduce, all-gather and reduce-scatter, from 64 KiB to 256 MiB.

Over the ranks of one node, and over all ranks where there are several nodes.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from paceline.catalog.measured import CollectiveTime
from paceline.runtime.calibrate.clock import Clock

_SIZES = tuple(64 * 1024 * 4**step for step in range(7))
"""64 KiB to 256 MiB."""

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


def measure_collectives(
    clock: Clock, device: torch.device, *, ranks_per_node: int
) -> list[CollectiveTime]:
    """Every size there is time for, small to large; nothing for a single rank."""
    if not dist.is_initialized():
        return []
    world = dist.get_world_size()
    spans: list[tuple[dist.ProcessGroup | None, int, bool]] = []
    if ranks_per_node > 1:
        group = None if world == ranks_per_node else _group_of_node(world, ranks_per_node)
        spans.append((group, ranks_per_node, True))
    if world > ranks_per_node:
        spans.append((None, world, False))
    times: list[CollectiveTime] = []
    for position, (group, size, is_inside) in enumerate(spans):
        name = "of a node" if is_inside else "between nodes"
        with clock.part(f"collectives {name}", clock.left_s / (len(spans) - position)):
            times += _measure_group(clock, device, group, size, is_inside)
    return times


def _group_of_node(world: int, ranks_per_node: int) -> dist.ProcessGroup | None:
    mine = None
    for first in range(0, world, ranks_per_node):
        ranks = list(range(first, first + ranks_per_node))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _measure_group(
    clock: Clock,
    device: torch.device,
    group: dist.ProcessGroup | None,
    size: int,
    is_inside: bool,
) -> list[CollectiveTime]:
    times: list[CollectiveTime] = []
    planned = [(num_bytes, kind) for num_bytes in _SIZES for kind in _KINDS]
    for position, (num_bytes, kind) in enumerate(planned):
        # What the small ones do not use is for the large ones.
        share_s = clock.left_s / max(3, len(planned) - position)
        call, moved = _call(kind, num_bytes, device, group, size)
        timing = clock.time(call, budget_s=share_s)
        if timing is not None:
            times.append(
                CollectiveTime(
                    kind=kind,
                    num_bytes=moved,
                    num_ranks=size,
                    is_inside_node=is_inside,
                    seconds=timing.seconds,
                    spread=timing.spread,
                    num_repeats=timing.num_repeats,
                )
            )
    return times


_KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def _call(
    kind: Kind,
    num_bytes: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    size: int,
) -> tuple[Callable[[], object], int]:
    part = num_bytes // 4 // size
    whole = torch.zeros(part * size, device=device)
    one = torch.zeros(part, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group), whole.nbytes
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, one, group=group), whole.nbytes
    return lambda: dist.reduce_scatter_tensor(one, whole, group=group), whole.nbytes
