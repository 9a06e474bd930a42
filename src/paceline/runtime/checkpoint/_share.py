"""Which part of the state this rank writes, and a copy of it to write from."""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.runtime.checkpoint._agree import Group, gather
from paceline.runtime.state import Box, Stored, boxes_of


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank writes, or reads, of one tensor."""

    size: tuple[int, ...]
    """Of the whole tensor."""

    boxes: tuple[Box, ...]


Share = Mapping[str, Part | Any]
"""Name -> the part of a tensor, or another value."""

_Key = tuple[str, tuple[int, ...] | None]
"""A name and where a box begins; None for a value that is no tensor."""


class Dealer:
    """Deals the state out, so that every part of it is written once, whoever holds it.

    A box that several ranks hold (replicas, what tensor ranks have whole, a tied parameter on two
    stages) is written by one of them: the largest first, each by the rank with the least so far.
    Every rank comes to the same deal from the same table. The table is gathered again only when
    some rank holds something else than at the last save.
    """

    def __init__(self) -> None:
        self._seals: list[str] = []
        self._mine: set[_Key] = set()

    def own_share(self, state: Mapping[str, Stored | Any], group: Group) -> dict[str, Part | Any]:
        """What this rank writes of what it holds. Collective."""
        held = {
            name: Part(value.size, tuple(boxes_of(value))) if isinstance(value, Stored) else value
            for name, value in state.items()
        }
        listed = dict(_listed(held))
        seals = gather(hashlib.sha256(repr(listed).encode()).hexdigest(), group)
        if seals != self._seals:
            everyone = gather(listed, group)
            self._mine = _deal(everyone, torch.distributed.get_rank(group))
            self._seals = seals
        return dict(_kept(held, self._mine))


def _listed(held: Share) -> Iterator[tuple[_Key, int]]:
    """Every box and its bytes."""
    for name, value in held.items():
        if not isinstance(value, Part):
            yield (name, None), 0
            continue
        for box in value.boxes:
            yield (name, box.offset), box.tensor.nbytes


def _deal(everyone: list[dict[_Key, int]], rank: int) -> set[_Key]:
    holders: dict[_Key, list[int]] = {}
    for holder, listed in enumerate(everyone):
        for key in listed:
            holders.setdefault(key, []).append(holder)
    load = [0] * len(everyone)
    mine: set[_Key] = set()
    # What only one rank can write comes first, so that the rest evens it out.
    order = sorted(holders, key=lambda key: (len(holders[key]) > 1, -_bytes(everyone, key), key[0]))
    for key in order:
        writer = min(holders[key], key=lambda holder: (load[holder], holder))
        load[writer] += _bytes(everyone, key)
        if writer == rank:
            mine.add(key)
    return mine


def _bytes(everyone: list[dict[_Key, int]], key: _Key) -> int:
    return next(listed[key] for listed in everyone if key in listed)


def _kept(held: Share, mine: set[_Key]) -> Iterator[tuple[str, Part | Any]]:
    for name, value in held.items():
        if isinstance(value, Part):
            boxes = tuple(box for box in value.boxes if (name, box.offset) in mine)
            if boxes:
                yield name, Part(value.size, boxes)
        elif (name, None) in mine:
            yield name, value


def local_bytes(share: Share) -> int:
    """Bytes of the tensors of a share."""
    parts = [value for value in share.values() if isinstance(value, Part)]
    return sum(box.tensor.nbytes for part in parts for box in part.boxes)


class Stage:
    """A copy of a share in host memory, so that training may go on while it is written.

    The memory is kept from save to save: after the first, staging costs one plain copy.
    """

    def __init__(self) -> None:
        self._memory: dict[_Key, Tensor] = {}

    @torch.no_grad()
    def copy(self, share: Share) -> dict[str, Part | Any]:
        """The share's values as they are now. The last copy returned is overwritten."""
        staged: dict[str, Part | Any] = {}
        on_accelerator = False
        for name, value in share.items():
            if not isinstance(value, Part):
                staged[name] = copy.deepcopy(value)
                continue
            boxes = []
            for box in value.boxes:
                on_accelerator |= box.tensor.device.type == "cuda"
                memory = self._room((name, box.offset), box.tensor)
                memory.copy_(box.tensor, non_blocking=True)
                boxes.append(Box(box.offset, memory))
            staged[name] = Part(value.size, tuple(boxes))
        if on_accelerator:
            torch.cuda.synchronize()
        return staged

    def _room(self, key: _Key, source: Tensor) -> Tensor:
        kept = self._memory.get(key)
        if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
            pinned = source.device.type == "cuda"
            kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            self._memory[key] = kept
        return kept
