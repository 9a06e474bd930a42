"""Trained weights from safetensors files: each rank reads the slices that it holds.

The model is built on meta and split as for drawn weights; what lies on a rank of each parameter is
then read straight from the files. Ranks that hold the same part read it once: one reads, and hands
it on to the next. Which tensor of the files is which part of a parameter is `pretrained_names.py`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.job.pretrained import Pretrained
from paceline.job.safetensors import BYTES, StoredTensor, stored_tensors
from paceline.runtime.pretrained_names import Mapped, Piece, map_adapter, map_weights
from paceline.runtime.strategy.adapter.nf4 import byte_span, store, value_box

CHUNK_BYTES = 16 << 20
"""Read, sent and copied at once. A guess: small beside a shard, large beside a disk's block."""

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Box = tuple[tuple[int, ...], Tensor]
"""Where this rank's part of a parameter begins in it, and the part, in its memory."""

_Span = tuple[slice, ...]


@dataclass(frozen=True)
class FromPretrained:
    """A factory of a model whose numbers come from files. The model is built without reading any.

    `session.build` asks it for `weights_of` the model before that is split.
    """

    build: Callable[[], nn.Module]
    found: Pretrained

    def __call__(self) -> nn.Module:
        return self.build()

    def weights_of(self, model: nn.Module, digest: str = "") -> "Weights":
        """How to fill the whole model that was built, on meta. Saved buffers are filled here.

        Raises:
            JobError: `M012`, a file is damaged; `M013`, tensors are missing, left over or of
                another shape; `M014`, they are stored in a way that cannot be read.
        """
        stored = stored_tensors(self.found.weights, where=self.found.where)
        where = self.found.where
        mapped = map_weights(model, stored, where=where)
        if self.found.start:
            adapter = stored_tensors(self.found.start[:1], where="train.adapter.start")
            mapped.pieces.update(map_adapter(model, adapter))
        weights = Weights(mapped, where=where, digest=digest)
        weights.fill_buffers(model)
        return weights


class Weights:
    """Reads a model's parameters from files. Counts the bytes that this rank read."""

    def __init__(self, mapped: Mapped, *, where: str, digest: str = "") -> None:
        self._pieces = mapped.pieces
        self._twins = mapped.twins
        self._where = where
        self._files: dict[Path, int] = {}
        self.digest = digest

        self.bytes_read = 0

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._pieces)

    @torch.no_grad()
    def fill(self, boxes: Mapping[str, list[Box]], *, is_shared: bool = True) -> None:
        """Fill what lies on this rank. Collective where it is shared: all ranks take the names in
        the same order.

        Args:
            is_shared: Whether all ranks fill at once, and one reads for those that hold the same.

        Raises:
            JobError: `M013`, stored tensors of a tied parameter differ; `M015`, a tensor that this
                rank read has values that are not finite.
        """
        together = self._together(boxes)
        me = dist.get_rank()
        holders = _holders(together) if is_shared else {n: [me] for n in together if together[n]}
        try:
            if is_shared and me == 0:
                for first, second in self._twins:
                    self._compare(first, second)
            for number, (name, ranks) in enumerate(holders.items()):
                turn = number % len(ranks)
                chain = ranks[turn:] + ranks[:turn]
                for piece in self._pieces[name]:
                    for begin, local in together[name]:
                        self._fill_box(piece, begin, local, chain)
        finally:
            self._close()

    def _together(self, boxes: Mapping[str, list[Box]]) -> dict[str, list[Box]]:
        """This rank's parts of each parameter, in the same order on every rank. A tied one is there
        once: two pipeline stages have it under two names."""
        first: dict[int, str] = {}
        parts: dict[str, list[Box]] = {}
        for name in sorted(self._pieces):
            one = first.setdefault(id(self._pieces[name]), name)
            parts.setdefault(one, []).extend(boxes.get(name, ()))
        return parts

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module) -> None:
        """Fill the saved buffers that the files have: they are small, and every rank reads them."""
        try:
            for name, buffer in model.named_buffers():
                for piece in self._pieces.get(name, ()):
                    self._fill_box(piece, (0,) * buffer.dim(), buffer, ())
        finally:
            self._close()

    def _fill_box(
        self, piece: Piece, begin: tuple[int, ...], local: Tensor, chain: Sequence[int]
    ) -> None:
        inside, there = [], []
        sides = zip(piece.start, piece.shape, *value_box(begin, local), strict=True)
        for start, size, first, count in sides:
            low, high = max(start, first), min(start + size, first + count)
            if high <= low:
                return
            inside.append(slice(low - first, high - first))
            there.append(slice(low - start, high - start))
        target = local[byte_span(local, inside)][(0,) * piece.lead]
        for span, part in _chunks(piece.stored, tuple(there[piece.lead :]), target):
            store(part, self._values(piece.stored, span, chain))

    def _values(self, stored: StoredTensor, span: _Span, chain: Sequence[int]) -> Tensor:
        """The values of a span, in the file's type: read by the chain's first rank, and handed on
        by each to the next one."""
        values = torch.empty([each.stop - each.start for each in span], dtype=_TYPES[stored.dtype])
        at = chain.index(dist.get_rank()) if chain else 0
        if at == 0:
            self._read(stored, span, values)
        else:
            dist.recv(_as_bytes(values), chain[at - 1])
        if at + 1 < len(chain):
            dist.send(_as_bytes(values), chain[at + 1])
        return values

    def _read(self, stored: StoredTensor, span: _Span, values: Tensor) -> None:
        width = values.element_size()
        room = memoryview(_as_bytes(values).numpy().data)
        at = 0
        for offset, count in _runs(stored.shape, span):
            self._read_run(stored, stored.start + offset * width, room[at : at + count * width])
            at += count * width
        self.bytes_read += at
        if not bool(torch.isfinite(values).all()):
            raise JobError.of(
                code="M015",
                what=f"{stored.name} in {stored.path.name} has values that are not finite (NaN or "
                "infinite)",
                where=f"{self._where}: {stored.path.parent}",
                fix="download the file again, or take weights of an earlier step: a model that "
                "starts from these computes NaN",
            )

    def _read_run(self, stored: StoredTensor, offset: int, room: memoryview) -> None:
        if stored.path not in self._files:
            self._files[stored.path] = os.open(stored.path, os.O_RDONLY)
        while room:
            count = os.preadv(self._files[stored.path], [room], offset)
            if count == 0:
                raise OSError(f"{stored.path} became shorter while it was read")
            room, offset = room[count:], offset + count

    def _compare(self, first: StoredTensor, second: StoredTensor) -> None:
        span = tuple(slice(0, size) for size in first.shape)
        empty = torch.empty(first.shape, device="meta")
        for part, _ in _chunks(first, span, empty):
            if not torch.equal(self._values(first, part, ()), self._values(second, part, ())):
                raise JobError.of(
                    code="M013",
                    what=f"{first.name} and {second.name} differ in the files, and by config.json "
                    "they are one parameter (tie_word_embeddings)",
                    where=f"{self._where}: {first.path.parent}",
                    fix="set tie_word_embeddings to false in config.json to train both, or remove "
                    f"{second.name} from the files",
                )

    def _close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


def _holders(boxes: Mapping[str, list[Box]]) -> dict[str, list[int]]:
    """Name -> the ranks that hold the same parts of it as this rank, which is one of them.
    Collective."""
    mine = [_digest(parts) for parts in boxes.values()]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return {
        name: [rank for rank, theirs in enumerate(told) if theirs[number] == mine[number]]
        for number, name in enumerate(boxes)
        if mine[number]
    }


def _digest(boxes: Sequence[Box]) -> int:
    places = [(begin, tuple(local.shape)) for begin, local in boxes if local.numel()]
    if not places:
        return 0
    return int.from_bytes(blake2b(repr(places).encode(), digest_size=7).digest()) or 1


def _as_bytes(values: Tensor) -> Tensor:
    return values.view(-1).view(torch.uint8)


def _chunks(stored: StoredTensor, span: _Span, target: Tensor) -> Iterator[tuple[_Span, Tensor]]:
    if not span:
        yield span, target
        return
    first, *rest = span
    row_bytes = BYTES[stored.dtype] * prod(each.stop - each.start for each in rest)
    rows = max(1, CHUNK_BYTES // max(1, row_bytes))
    for low in range(first.start, first.stop, rows):
        high = min(first.stop, low + rows)
        yield (slice(low, high), *rest), target[low - first.start : high - first.start]


def _runs(shape: tuple[int, ...], span: _Span) -> Iterator[tuple[int, int]]:
    """Where the values of a span lie in a tensor, row after row: first value, number of values.

    >>> list(_runs((4, 6), (slice(1, 3), slice(2, 4))))
    [(8, 2), (14, 2)]
    >>> list(_runs((4, 6), (slice(1, 3), slice(0, 6))))
    [(6, 12)]
    """
    dims = len(shape)
    while dims and (span[dims - 1].start, span[dims - 1].stop) == (0, shape[dims - 1]):
        dims -= 1
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if dims == 0:
        yield 0, prod(shape)
        return
    last = span[dims - 1]
    for index in product(*(range(each.start, each.stop) for each in span[: dims - 1])):
        outer = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield outer + last.start * strides[dims - 1], (last.stop - last.start) * strides[dims - 1]
