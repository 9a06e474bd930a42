"""One SHA-256 of everything that training changes: the oracle that a recovery was exact."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime.checkpoint._all_ranks import gather, threads_for_this_rank
from paceline.runtime.state import Box, Stored, boxes_of, named_state

_AHEAD = 2
"""Tensors that wait for a thread to hash them, for each thread, before the next is fetched: so
that hashing and sending overlap. A guess."""


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256, 64 hex digits, of all parameters, saved buffers and optimizer state.

    Each tensor's name, shape, type and SHA-256 is a line; the digest is of the lines, sorted. The
    same values give the same digest in every layout, on any number of ranks, and on every rank. A
    rank whose copy of something differs from the other ranks' has another digest than they. What
    only one rank's part of a parameter has (`state.optimizer_name`) makes the digest the layout's
    own. Learning rates and other options of the optimizer are not in it.

    Collective over all ranks. A tensor that is split over ranks is put together and hashed by one
    of them, each rank hashing about as many bytes. Parts go over gloo from host memory, so that no
    device group's time limit counts. Host memory: some whole tensors at a time.
    """
    state = named_state(model, optimizer)
    threads = threads_for_this_rank()
    with ThreadPoolExecutor(threads) as pool:
        lines = _Lines(pool, most=threads * (1 + _AHEAD))
        everywhere = _hash_own(state, lines)
        if not dist.is_initialized():
            return seal_of(lines.result())
        _hash_shared(state, lines)
        mine = lines.result()
    shared = {name: line for name, line in mine.items() if name not in everywhere}
    own = {name: mine[name] for name in everywhere}
    group = dist.group.WORLD
    seals = gather(seal_of(own), group)
    # One of the ranks that have the same lines tells them.
    speaks = seals.index(seal_of(own)) == dist.get_rank(group)
    told = gather({**(own if speaks else {}), **shared}, group)
    joined = {name: line for part in reversed(told) for name, line in part.items()}
    return seal_of(joined | own | shared)


class _Lines:
    """Lines of the digest, hashed by threads."""

    def __init__(self, pool: ThreadPoolExecutor, *, most: int) -> None:
        self._pool = pool
        self._most = most
        self._waiting: deque[tuple[str, Future[str]]] = deque()
        self._lines: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Have a whole tensor hashed; waits while too many are waiting."""
        while len(self._waiting) >= self._most:
            self._take()
        self._waiting.append((name, self._pool.submit(line_of, tensor)))

    def note(self, name: str, line: str) -> None:
        """Add a line that is known."""
        self._lines[name] = line

    def result(self) -> dict[str, str]:
        """All lines by name."""
        while self._waiting:
            self._take()
        return dict(self._lines)

    def _take(self) -> None:
        name, line = self._waiting.popleft()
        self._lines[name] = line.result()


def _hash_own(state: Mapping[str, Stored | Any], lines: _Lines) -> set[str]:
    """Hash what this rank has whole; return the names of what every rank is to have alike."""
    everywhere = set()
    for name, value in sorted(state.items()):
        if not isinstance(value, Stored):
            lines.note(name, repr(value))
            everywhere.add(name)
        elif not _holders(value)[1:]:
            lines.add(name, _joined(value))
            if not isinstance(value.pieces[0][1], DTensor):
                everywhere.add(name)
    return everywhere


class _Task(NamedTuple):
    """One copy of a tensor that is split over ranks."""

    name: str
    holders: tuple[int, ...]


class _Held(NamedTuple):
    """What one rank has of a tensor."""

    num_bytes: int
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Offset and shape of each part."""


def _hash_shared(state: Mapping[str, Stored | Any], lines: _Lines) -> None:
    """Send this rank's parts of split tensors to the rank that hashes each, and hash the own share.

    All ranks go through the tasks in one order, so that of the tasks that are not done the first
    always gets done: nobody waits in a circle.
    """
    mine: dict[_Task, list[Box]] = {}
    listed: dict[_Task, _Held] = {}
    for name, value in sorted(state.items()):
        if isinstance(value, Stored) and (holders := _holders(value))[1:]:
            task = _Task(name, holders)
            mine[task] = boxes_of(value)
            num_bytes = prod(value.size) * value.dtype.itemsize
            boxes = tuple((box.offset, tuple(box.tensor.shape)) for box in mine[task])
            listed[task] = _Held(num_bytes, boxes)
    rank, everyone = dist.get_rank(), gather(listed, None)
    sent: deque[tuple[dist.Work, Tensor]] = deque()
    for task, hasher in _hashers(everyone):
        if task not in mine:
            continue
        value = state[task.name]
        own = {box.offset: box.tensor for box in mine[task]}
        if hasher == rank:
            lines.add(task.name, _fetched(task, everyone, value, own))
            continue
        for holder, offset, _ in _senders(task, everyone, hasher):
            if holder == rank:
                part = own[offset].cpu().contiguous().reshape(-1).view(torch.uint8)
                sent.append((_sent(part, hasher), part))
        while len(sent) > _AHEAD:
            sent.popleft()[0].wait()
    for work, _ in sent:
        work.wait()


def _hashers(everyone: list[dict[_Task, _Held]]) -> Iterator[tuple[_Task, int]]:
    """Who hashes which copy of which tensor, in the order in which all do it."""
    sizes = {task: held.num_bytes for listed in everyone for task, held in listed.items()}
    load, hashers = [0] * len(everyone), {}
    for task in sorted(sizes, key=lambda task: (-sizes[task], task)):
        hashers[task] = min(task.holders, key=lambda holder: (load[holder], holder))
        load[hashers[task]] += sizes[task]
    for task in sorted(sizes):
        yield task, hashers[task]


def _senders(
    task: _Task, everyone: list[dict[_Task, _Held]], hasher: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    seen = {offset for offset, _ in everyone[hasher][task].boxes}
    for holder in task.holders:
        for offset, shape in everyone[holder][task].boxes:
            if offset not in seen:
                seen.add(offset)
                if prod(shape) > 0:
                    yield holder, offset, shape


def _fetched(
    task: _Task,
    everyone: list[dict[_Task, _Held]],
    stored: Stored,
    own: Mapping[tuple[int, ...], Tensor],
) -> Tensor:
    """The whole tensor on the rank that hashes it, in host memory."""
    whole = torch.empty(stored.size, dtype=stored.dtype)
    coming = []
    for holder, offset, shape in _senders(task, everyone, dist.get_rank()):
        place = whole[_box(offset, shape)]
        part = place if place.is_contiguous() else torch.empty(shape, dtype=stored.dtype)
        work = dist.irecv(part.reshape(-1).view(torch.uint8), holder)
        assert work is not None, "this rank is in the group"
        coming.append((work, place, part))
    for offset, held in own.items():
        whole[_box(offset, tuple(held.shape))] = held.cpu()
    for work, place, part in coming:
        work.wait()
        if part is not place:
            place.copy_(part)
    return whole


def _box(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _sent(part: Tensor, hasher: int) -> dist.Work:
    work = dist.isend(part, hasher)
    assert work is not None, "this rank is in the group"
    return work


def _holders(stored: Stored) -> tuple[int, ...]:
    """Ranks that have the parts of this rank's copy of a tensor; none or one when it is whole."""
    split, mesh = set(), None
    for _, piece in stored.pieces:
        if isinstance(piece, DTensor):
            mesh = piece.device_mesh
            split |= {dim for dim, each in enumerate(piece.placements) if not each.is_replicate()}
    if mesh is None or not split:
        return ()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank has no part of a tensor on a mesh it is not in"
    copy = tuple(slice(None) if dim in split else at for dim, at in enumerate(coordinate))
    return tuple(int(rank) for rank in mesh.mesh[copy].flatten())


def _joined(stored: Stored) -> Tensor:
    boxes = boxes_of(stored)
    if len(boxes) == 1:
        return boxes[0].tensor
    whole = torch.empty(stored.size, dtype=stored.dtype)
    for box in boxes:
        whole[_box(box.offset, tuple(box.tensor.shape))] = box.tensor.cpu()
    return whole


def line_of(tensor: Tensor) -> str:
    """What the digest has of a whole tensor, besides its name."""
    plain = tensor.cpu().contiguous()
    values = hashlib.sha256(plain.flatten().view(torch.uint8).numpy().data).hexdigest()
    return f"{list(plain.shape)} {plain.dtype} {values}"


def seal_of(lines: Mapping[str, str]) -> str:
    """The digest of a state from its lines by name; of another value the line is its `repr`."""
    text = "".join(f"{name} {line}\n" for name, line in sorted(lines.items()))
    return hashlib.sha256(text.encode()).hexdigest()
