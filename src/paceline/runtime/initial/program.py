"""What a factory did to make a model's tensors, so that it can be repeated for some of them.

The operations are repeated in their order, with the same generator, and so give the same bits. A
tensor is in memory from the first operation that counts for it to the last. What is overwritten
whole later only draws its numbers; large tensors are drawn a block at a time.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from paceline.runtime import _torch_private as private
from paceline.runtime._torch_private import tree_leaves, tree_map_only

aten = torch.ops.aten

BLOCK = 1 << 22
"""Numbers drawn at once, 16 MiB in float32: small beside a model. A guess."""

ALIGNMENT = 16
"""Numbers that torch's normal distribution makes from 16 uniform ones at once: blocks of whole
sixteens give the bits of one draw. Source: torch 2.13, `normal_fill` in DistributionTemplates.h."""

_IN_BLOCKS = frozenset(
    {aten.uniform_.default, aten.normal_.default, aten.zero_.default, aten.fill_.Scalar}
)
"""Operations that give the same bits block by block."""

_FILLS = _IN_BLOCKS | {
    aten.copy_.default,
    aten.fill_.Tensor,
    aten.exponential_.default,
    aten.bernoulli_.float,
    aten.random_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    private.TRUNC_NORMAL,
}
"""Operations that overwrite the tensor they are given and do not read it."""

_POINTWISE = frozenset(
    {
        aten.mul_.Tensor,
        aten.mul_.Scalar,
        aten.add_.Tensor,
        aten.add_.Scalar,
        aten.sub_.Tensor,
        aten.div_.Tensor,
        aten.clamp_.default,
        aten.erfinv_.default,
        aten.neg_.default,
    }
)
"""Operations in place that may follow a draw block by block, if all else they take are numbers:
`nn.init.trunc_normal_` is made of them."""


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor lies in a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, in real memory."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    @property
    def is_plain(self) -> bool:
        """Whether it begins where its storage does, row after row."""
        expected = tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        pairs = zip(self.stride, expected, self.shape, strict=True)
        return self.offset == 0 and all(a == b or size == 1 for a, b, size in pairs)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on deferred tensors. Tensors among its arguments are `View`s, or real ones."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    makes: tuple[View | None, ...]
    """New tensors among what it returns, in order."""

    writes: frozenset[int]
    """Storages it changes."""

    is_random: bool

    state: Tensor | None
    """What the factory has set torch's generator to just before; None where it did not."""

    @property
    def touched(self) -> frozenset[int]:
        """Storages it reads or changes."""
        leaves = tree_leaves((self.args, self.kwargs))
        return frozenset(leaf.storage for leaf in leaves if isinstance(leaf, View))

    @property
    def made(self) -> frozenset[int]:
        """Storages that begin here."""
        return frozenset(view.storage for view in self.makes if view is not None)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that somebody wants of a program."""

    view: View

    put: Callable[[tuple[int, ...], Tensor], None]
    """Called with values and where they begin in the tensor; once, or block by block."""


class Program:
    """The operations of a factory, in order."""

    def __init__(self, state: Tensor) -> None:
        self.operations: list[Operation] = []
        self.sizes: dict[int, int] = {}
        """Bytes of each storage."""

        self.start = state
        """State of torch's generator before the first operation."""

        self.end: Tensor | None = None
        """What the factory has set it to after the last one; None where it did not."""

    def digest(self) -> str:
        """SHA-256 of all that the numbers follow from, this processor's way to draw included."""
        text = hashlib.sha256(self.start.numpy().tobytes())
        for operation in self.operations:
            told = tree_map_only(Tensor, _digest, (operation.args, operation.kwargs))
            state = "" if operation.state is None else _digest(operation.state)
            name = getattr(operation.function, "__name__", "")
            text.update(f"{name} {told} {state}\n".encode())
        generator = torch.Generator().manual_seed(1)
        for draw in (torch.Tensor.normal_, torch.Tensor.uniform_):
            text.update(_digest(draw(torch.empty(256), generator=generator)).encode())
        return text.hexdigest()

    @torch.no_grad()
    def run(self, targets: Sequence[Target], *, draws: bool = True) -> None:
        """Make the wanted tensors. Torch's generator ends as the factory would have left it.

        Args:
            draws: Whether random operations may be done; where one is needed and may not, it is
                a ValueError.
        """
        wanted: dict[int, list[Target]] = {}
        for target in targets:
            wanted.setdefault(target.view.storage, []).append(target)
        kept = self._needed(set(wanted), draws=draws)
        if not draws and any(self.operations[index].is_random for index in kept):
            raise ValueError("a value that is drawn at random")
        if draws:
            torch.set_rng_state(self.start)
        _Run(self, wanted, kept, draws=draws).go()
        if draws and self.end is not None:
            torch.set_rng_state(self.end)

    def fills(self, operation: Operation) -> View | None:
        """The tensor that an operation overwrites, if that is all of its storage."""
        first = operation.args[0] if operation.args else None
        if operation.function not in _FILLS or not isinstance(first, View) or not first.is_plain:
            return None
        others = tree_leaves((operation.args[1:], operation.kwargs))
        reads_itself = any(isinstance(o, View) and o.storage == first.storage for o in others)
        is_whole = first.num_bytes == self.sizes[first.storage]
        return first if is_whole and not reads_itself else None

    def _needed(self, wanted: set[int], *, draws: bool) -> set[int]:
        """Operations without which the wanted storages would be others, and those that draw
        without saying how many numbers."""
        live, kept = set(wanted), set()
        for index in reversed(range(len(self.operations))):
            operation = self.operations[index]
            filled = self.fills(operation)
            must_draw = draws and operation.is_random and filled is None
            if not must_draw and not (operation.writes | operation.made) & live:
                continue
            kept.add(index)
            live |= operation.touched
            live -= operation.made
            if filled is not None:
                live.discard(filled.storage)
        return kept


class _Run:
    """A program under way."""

    def __init__(
        self, program: Program, wanted: dict[int, list[Target]], kept: set[int], *, draws: bool
    ) -> None:
        self.program = program
        self.wanted = wanted
        self.kept = kept
        self.draws = draws
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.uses: dict[int, list[int]] = {}
        for index in sorted(kept):
            for storage in program.operations[index].touched | program.operations[index].made:
                self.uses.setdefault(storage, []).append(index)

    def go(self) -> None:
        """Every operation that counts; the others only draw."""
        done: set[int] = set()
        for index, operation in enumerate(self.program.operations):
            if self.draws and operation.state is not None:
                torch.set_rng_state(operation.state)
            if index in done:
                continue
            if index not in self.kept:
                if self.draws and operation.is_random:
                    self._in_blocks(operation, (), None)
                continue
            tail = self._tail(index, operation)
            if tail is not None:
                target = self.wanted[operation.args[0].storage][0]
                self._in_blocks(operation, [self.program.operations[i] for i in tail], target)
                done.update(tail)
                continue
            self._do(operation)
            for storage in operation.touched | operation.made:
                if self.uses[storage][-1] == index:
                    self._finish(storage)

    def _tail(self, index: int, operation: Operation) -> list[int] | None:
        """What follows a draw of a wanted tensor, where all of it can be done block by block."""
        filled = self.program.fills(operation)
        if filled is None or operation.function not in _IN_BLOCKS:
            return None
        targets = self.wanted.get(filled.storage, [])
        if len(targets) != 1 or targets[0].view != filled:
            return None
        later = [each for each in self.uses[filled.storage] if each > index]
        operations = [self.program.operations[each] for each in later]
        is_simple = all(
            each.function in _POINTWISE and each.args[0] == filled and _has_one_tensor(each)
            for each in operations
        )
        return later if is_simple else None

    def _in_blocks(
        self, operation: Operation, tail: Sequence[Operation], target: Target | None
    ) -> None:
        view: View = operation.args[0]
        pieces = blocks(view.shape) if operation.function in _IN_BLOCKS else _whole(view.shape)
        for start, shape in pieces:
            block = torch.empty(shape, dtype=view.dtype)
            for each in (operation, *tail):
                each.function(block, *each.args[1:], **each.kwargs)
            if target is not None:
                target.put(start, block)

    def _do(self, operation: Operation) -> None:
        args, kwargs = tree_map_only(View, self._tensor, (operation.args, operation.kwargs))
        result = operation.function(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for view, tensor in zip(operation.makes, made, strict=True):
            if view is not None:
                self._keep(view, tensor)

    def _tensor(self, view: View) -> Tensor:
        if view.storage not in self.storages:  # made by `torch.empty`, which is no operation
            size = self.program.sizes[view.storage]
            self.storages[view.storage] = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        return view.of(self.storages[view.storage])

    def _keep(self, view: View, tensor: Tensor) -> None:
        is_alike = tensor.stride() == view.stride and tensor.storage_offset() == view.offset
        if is_alike and tensor.untyped_storage().nbytes() >= self.program.sizes[view.storage]:
            self.storages[view.storage] = tensor.untyped_storage()
        else:
            self._tensor(view).copy_(tensor)

    def _finish(self, storage: int) -> None:
        for target in self.wanted.get(storage, ()):
            target.put((0,) * len(target.view.shape), self._tensor(target.view))
        self.storages.pop(storage, None)


def blocks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Where each block of a tensor begins, and its shape, in the order of memory. Every block but
    the last has a multiple of `ALIGNMENT` numbers; one block where that cannot be.

    >>> list(blocks((3, 2)))
    [((0, 0), (3, 2))]
    """
    if prod(shape) <= BLOCK:
        return _whole(shape)
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= BLOCK)
    inner = prod(shape[dim + 1 :])
    step = ALIGNMENT // gcd(inner, ALIGNMENT)
    num_rows = BLOCK // inner // step * step
    is_even = dim == 0 or shape[dim] * inner % ALIGNMENT == 0
    if num_rows == 0 or not is_even:
        return _whole(shape)
    return _blocks(shape, dim, num_rows)


def _blocks(
    shape: tuple[int, ...], dim: int, num_rows: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    inner, behind = prod(shape[dim + 1 :]), len(shape) - dim - 1
    for before in product(*(range(size) for size in shape[:dim])):
        first = 0
        while first < shape[dim]:
            rows = min(num_rows, shape[dim] - first)
            if (shape[dim] - first - rows) * inner < ALIGNMENT:
                rows = shape[dim] - first  # torch draws fewer than sixteen in another way
            yield (*before, first, *(0,) * behind), (*(1,) * dim, rows, *shape[dim + 1 :])
            first += rows


def _whole(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    yield (0,) * len(shape), shape


def _has_one_tensor(operation: Operation) -> bool:
    others = tree_leaves((operation.args[1:], operation.kwargs))
    return not any(
        isinstance(each, View) or (isinstance(each, Tensor) and each.dim() > 0) for each in others
    )


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()}"
