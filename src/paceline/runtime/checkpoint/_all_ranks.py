"""All ranks hear all ranks, so that all do the same thing next."""

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from paceline.record.ownership import machine
from paceline.runtime.checkpoint._reason import plain_reason

Group = dist.ProcessGroup | None
_T = TypeVar("_T")


def gather(value: _T, group: Group) -> list[_T]:
    """Every rank's value, by rank, on every rank."""
    values: list[_T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def from_first(value: _T, group: Group) -> _T:
    """Rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def threads_for_this_rank(group: Group = None) -> int:
    """Threads that this rank may keep busy: its machine's cores over the ranks there, at least one.
    Collective."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    machines = gather(machine(), group) if dist.is_initialized() else [machine()]
    return max(1, min(_MOST_THREADS, cores // machines.count(machine())))


_MOST_THREADS = 8
"""A guess: more seldom get more out of one file system or one memory."""


def attempt(action: Callable[[], _T], group: Group) -> tuple[_T | None, str | None]:
    """Do something on this rank, and hear whether it worked on all.

    Returns:
        What the action returned here, and None or the first rank's reason why it failed somewhere.
        The reason is the same on every rank.
    """
    result: _T | None = None
    reason: str | None = None
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        reason = plain_reason(error)
    reasons = gather(reason, group)
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return result, None
    rank, first = failed[0]
    return result, first if len(reasons) == 1 else f"{first} (rank {rank})"
