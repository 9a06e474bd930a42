"""One step of one rank, recorded: every living byte, operation and collective, in order.

A dispatch mode sees each operation on local tensors, fake or real. DTensors and tensors with a
pending collective are left to unwrap themselves first, so that only local work is recorded.

Leaves out: what a kernel allocates inside itself and gives back before it returns.
"""

import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.estimate.compute import HOOK_S
from paceline.prove import collectives, flops
from paceline.prove.collectives import Issued
from paceline.prove.places import Place, Places
from paceline.runtime._torch_private import (
    GROUPED_MM,
    FakeTensor,
    TorchDispatchMode,
    local_tensor,
    storage_key,
    tree_leaves,
    written_in_place,
)

ALLOC, FREE, OP, ISSUE, WAIT, PLACE, READ, ARRIVE = range(8)
"""Kinds of event; see `Trace.events`."""

LINK_COPY = "copy over the host's link"
"""Name of an operation whose bytes go from the host to the accelerator, or back."""

Stream = Literal["kernels", "copy in", "from host", "to host", "host"]
"""What carries an operation out: the accelerator's kernels; FSDP2's copies before its gathers and
those from the host, which do not wait for kernels; copies to the host; or the host itself."""

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_PLAIN = frozenset((FakeTensor, Tensor, torch.nn.Parameter, torch.nn.Buffer))
_FREE = """
empty empty_like empty_strided new_empty new_empty_strided detach alias view _unsafe_view slice
select split split_with_sizes unbind expand t transpose permute squeeze unsqueeze as_strided
set_ resize_ view_as_real view_as_complex chunk narrow reshape lift_fresh is_same_size unfold
diagonal
"""
_FREE_OPS = frozenset(getattr(_aten, name) for name in _FREE.split())
"""Operations that touch no element."""

_PARAMETER_READS = frozenset(
    (_aten.embedding, _aten.embedding_dense_backward, _aten.nll_loss_forward)
)
"""Operations that read a few values of their largest input."""

_WRITES = frozenset(
    getattr(_aten, name)
    for name in ("new_zeros", "new_ones", "zeros_like", "ones_like", "full_like", "zero_", "fill_")
)
"""Operations that take only a shape and a type from their input."""

_LIST_COPIES = frozenset(("split_with_sizes_copy", "chunk_cat", "_foreach_copy_"))
"""Copies between given tensors: FSDP2's out of what it gathered and into what it reduces. What they
write is among their arguments, and not read."""


@dataclass(slots=True)
class Operation:
    """One distinct operation: what its time depends on."""

    name: str
    flops: int
    num_bytes: int
    """Read and written."""

    matmul: tuple[int, int, int, int] | None
    """Rows, inner, columns and how many of them in one kernel."""

    attention_len: int
    """Tokens that attention sees at once; 0 of other operations."""

    is_backward: bool
    """Whether it is the second of attention's two kernels, the backward one."""

    stream: Stream
    host_s: float = 0.0
    """Seconds that it holds the host without launching a kernel."""


@dataclass(slots=True)
class Trace:
    """What one rank did in one step."""

    events: list[tuple[int, int, int]] = field(default_factory=list)
    """(ALLOC, storage, bytes), (FREE, storage, bytes), (OP, operation, 0), (ISSUE, collective, 0),
    (WAIT, collective, 0) and (PLACE, place, 0), each an index into the lists below; (READ, 0, 0)
    where the host reads a value of the device, (ARRIVE, 0, 0) where kernels read a copy from it."""

    operations: list[Operation] = field(default_factory=list)
    collectives: list[Issued] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    """Part of each storage; "" until `classify` has looked at its life."""

    host: set[int] = field(default_factory=set)
    """Storages in the host's memory, where the layout offloads."""

    start: int = 0
    """Index of the first event of the counted step."""

    plays: list[Any] = field(default_factory=list)
    """Stretches that come again without being run; see `replay.Play`."""

    played: set[int] = field(default_factory=set)
    """Storages that appear inside of those."""


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records into `trace`. Enter it before anything is allocated, leave it after the step."""

    def __init__(self, *, round_to: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.places = Places()
        self.routed_share = 1.0
        """Share of a grouped product's rows that are of experts on this rank: a kernel stops at the
        last one's, and fake tensors do not hold where that is."""

        self._round = round_to
        self._live: dict[int, list[Any]] = {}
        self._pending: dict[int, int] = {}
        self._known: dict[Any, int] = {}
        self._place_ids: dict[Place, int] = {}
        self._place: Place | None = None
        self._groups = collectives.Groups()
        self._resize: Any = None
        self._records = True
        self._arriving: set[int] = set()
        self._is_moving = False
        self.places.on_logits = lambda out: self.mark(_tensors(out), "logits and loss")

    def __enter__(self) -> "Tracer":
        # FSDP2 frees and refills its gathered parameters by resizing their storages, which no
        # dispatcher sees.
        self._resize = original = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            original(storage, size)
            self._grow(storage)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        self.places.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        self._records = False
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self.places.__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def mark(self, tensors: Any, part: str) -> None:
        """Say what some tensors are for, whatever their lives look like."""
        for tensor in tensors:
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            local = getattr(local, "elem", local)
            entry = self._entry(local.untyped_storage())
            self.trace.parts[entry[2]] = part

    def to_host(self, tensors: Any) -> None:
        """Say which tensors are in the host's memory; fake ranks have one memory."""
        for tensor in tensors:
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            self.trace.host.add(self._entry(local.untyped_storage())[2])

    def note_copies(self, tensors: Any, stream: Stream) -> None:
        """Note copies of tensors between host and accelerator."""
        for tensor in tensors:
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            self._note_operation(Operation(LINK_COPY, 0, _size(local), None, 0, False, stream))

    def moved(self, tensor: Tensor, stream: Stream) -> Tensor:
        """A copy of a tensor in the other memory."""
        self._is_moving = True
        out = tensor.clone()
        self._is_moving = False
        self.note_copies([tensor], stream)
        there = self.trace.host if stream == "to host" else self._arriving
        there.add(self._entry(out.untyped_storage())[2])
        return out

    def read(self) -> None:
        """The host reads a value here, which no fake tensor has."""
        self._note_place()
        self.trace.events.append((READ, 0, 0))

    def wait_for_sends(self, messages: range) -> None:
        """Compute waits until those of some messages that are sent have gone."""
        sent = [index for index in messages if self.trace.collectives[index].kind == "send"]
        self.trace.events += [(WAIT, index, 0) for index in sent]

    def begin_step(self) -> None:
        """What follows is the counted step; micro-batches count from 1 again."""
        self.trace.start = len(self.trace.events)
        self.places.micro_batch = 0
        self._place = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args, **kwargs)
        for each in types:
            if each not in _PLAIN:
                return NotImplemented
        if func.namespace in collectives.NAMESPACES:
            return self._communicate(func, args, kwargs)
        self._note_place()
        out = func(*args, **kwargs)
        self._compute(func, args, kwargs, out)
        return out

    def _note_place(self) -> None:
        place = self.places.now()
        if place == self._place:
            return
        self._place = place
        index = self._place_ids.get(place)
        if index is None:
            index = self._place_ids[place] = len(self.trace.places)
            self.trace.places.append(place)
        self.trace.events.append((PLACE, index, 0))

    def _compute(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func.overloadpacket
        outs = _tensors(out)
        for each in outs:
            if _has_memory(each):
                self._entry(each.untyped_storage())
        if func.namespace == "profiler":  # FSDP2 names what it does
            self._hold_host(str(args[0]).partition(" ")[0])
            return
        if packet in _FREE_OPS:
            return
        ins = _tensors((args, kwargs)) if kwargs else _tensors(args)
        if self._pending:
            for each in ins:
                self._wait(each)
        if self._is_moving:
            return
        stream = self._stream(ins, outs) if self.trace.host else None
        key = (func, stream, *((each.shape, each.dtype, each.is_contiguous()) for each in ins))
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = len(self.trace.operations)
            operation = _describe(func, packet, args, kwargs, out, ins, outs)
            if packet is GROUPED_MM:
                operation = _of_own_rows(operation, self.routed_share, is_sum=ins[1].dim() == 2)
            self.trace.operations.append(replace(operation, stream=stream or operation.stream))
        self.trace.events.append((OP, index, 0))
        if func.namespace == "fsdp":
            self._mark_fsdp(packet.__name__, outs, ins)

    def _stream(self, ins: list[Tensor], outs: list[Tensor]) -> Stream | None:
        """Where an operation runs that reads what is, or was, in the host's memory."""
        read, given = ({self._entry(t.untyped_storage())[2] for t in each} for each in (ins, outs))
        if read & self.trace.host:
            self.trace.host |= given
            return "host"
        if read and read <= self._arriving:  # cast before they are gathered
            self._arriving |= given
            return "copy in"
        if read & self._arriving:
            self._arriving -= read
            self.trace.events.append((ARRIVE, 0, 0))
        return None

    def _hold_host(self, name: str) -> None:
        """FSDP2's Python, which launches nothing meanwhile."""
        seconds = HOOK_S.get(name)
        if seconds is not None:
            self._note_operation(Operation(name, 0, 0, None, 0, False, "kernels", seconds))

    def _note_operation(self, operation: Operation) -> None:
        key = (operation.name, operation.stream, operation.num_bytes)
        index = self._known.get(key)
        if index is None:
            index = self._known[key] = len(self.trace.operations)
            self.trace.operations.append(operation)
        self.trace.events.append((OP, index, 0))

    def _mark_fsdp(self, name: str, outs: list[Tensor], ins: list[Tensor]) -> None:
        """FSDP2's own copies say what their buffers are for."""
        if name == "all_gather_copy_in":
            self.mark(outs, "gathered")
        elif name == "split_with_sizes_copy":
            self.mark(ins[1:], "gathered")
        elif name == "chunk_cat":
            self.mark(ins[-1:], "reducing")

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._note_place()
        if func.overloadpacket.__name__ == "wait_tensor":
            self._wait(args[0])
            # The same tensor with values; torch would pretend that it is a new one.
            return args[0] if type(args[0]) is FakeTensor else func(*args, **kwargs)
        out = func(*args, **kwargs)
        outs = _tensors(out)
        for each in outs:
            self._entry(each.untyped_storage())
        issued = collectives.issued(func, args, kwargs, out, self._groups)
        if issued is None or len(issued.ranks) < 2:
            return out
        ins = _tensors((args, kwargs))
        for each in ins:
            self._wait(each)
        index = len(self.trace.collectives)
        self.trace.collectives.append(issued)
        self.trace.events.append((ISSUE, index, 0))
        if issued.kind != "send":
            for each in _tensors(args[0]) if func.namespace == "c10d" else outs:
                self._pending[storage_key(each.untyped_storage())] = index
        return out

    def _wait(self, tensor: Tensor) -> None:
        index = self._pending.pop(storage_key(tensor.untyped_storage()), None)
        if index is not None:
            self.trace.events.append((WAIT, index, 0))

    def _grow(self, storage: Any) -> None:
        """A storage has another size than before."""
        entry = self._live.get(storage_key(storage))
        if entry is None:
            if storage.nbytes():
                self._note_place()
                self._entry(storage)
            return
        size = self._rounded(storage.nbytes())
        if size == entry[1]:
            return
        if entry[1]:
            self.trace.events.append((FREE, entry[2], entry[1]))
        if size:
            self._note_place()
            self.trace.events.append((ALLOC, entry[2], size))
        entry[1] = size

    def _entry(self, storage: Any) -> list[Any]:
        """[weak reference, bytes, index] of a storage, noted when it is new."""
        key = storage_key(storage)
        entry = self._live.get(key)
        if entry is not None:
            return entry
        size = self._rounded(storage.nbytes())
        index = len(self.trace.parts)
        self.trace.parts.append("")

        def free(_: Any) -> None:
            gone = self._live.pop(key)
            self._pending.pop(key, None)
            if gone[1] and self._records:
                self.trace.events.append((FREE, gone[2], gone[1]))

        entry = self._live[key] = [weakref.ref(storage, free), size, index]
        if size:
            self.trace.events.append((ALLOC, index, size))
        return entry

    def _rounded(self, size: int) -> int:
        return -(-size // self._round) * self._round


def _has_memory(tensor: Tensor) -> bool:
    """Not so on meta, where a pipeline keeps the shapes of what it will receive."""
    device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
    return device.type != "meta"


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _describe(
    func: Any, packet: Any, args: Any, kwargs: Any, out: Any, ins: list[Tensor], outs: list[Tensor]
) -> Operation:
    name = packet.__name__
    count = flops.flops_of(packet, args, kwargs, out)
    read, written = sum(map(_size, ins)), sum(map(_size, outs))
    if packet in _WRITES:
        read = 0
    elif packet in _PARAMETER_READS:
        largest = max(map(_size, (*ins, *outs)))
        read, written = read + written - largest, _size(ins[-1])
    elif name == "all_gather_copy_in":  # into this rank's part of a buffer for all
        read = written = sum(map(_size, _tensors(args[0])))
    elif not outs and name not in _LIST_COPIES:  # in place: what is written has been read
        written = sum(map(_size, _tensors(written_in_place(func, args))))
    return Operation(
        name=name,
        flops=count,
        num_bytes=read + written,
        matmul=_product(packet, ins) if count else None,
        attention_len=ins[0].shape[-2] if packet in flops.ATTENTION else 0,
        is_backward=name.endswith("backward"),
        stream="copy in" if name == "all_gather_copy_in" else "kernels",
    )


def _of_own_rows(whole: Operation, share: float, *, is_sum: bool) -> Operation:
    """A grouped product of a share of its rows, which it gives or, for a gradient, sums over."""
    assert whole.matmul is not None, "it is a product"
    rows, inner, columns, count = whole.matmul
    rows, inner = (rows, round(inner * share)) if is_sum else (round(rows * share), inner)
    flops_of_share = round(whole.flops * share)
    return replace(whole, flops=flops_of_share, matmul=(rows, inner, columns, count))


def _size(tensor: Tensor) -> int:
    """Bytes that are there: an expanded tensor is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _product(packet: Any, ins: list[Tensor]) -> tuple[int, int, int, int] | None:
    """Rows, inner, columns and count of a matrix product."""
    if packet in (_aten.addmm, _aten.baddbmm):
        ins = ins[1:]
    if len(ins) < 2 or packet in flops.ATTENTION:
        return None
    left, right = ins[0], ins[1]
    if packet is GROUPED_MM:
        groups = right.shape[0] if right.dim() == 3 else ins[2].shape[0]
        if right.dim() == 3:
            return left.shape[-2] // groups, left.shape[-1], right.shape[-1], groups
        return left.shape[-2], left.shape[-1] // groups, right.shape[-1], groups
    if packet in (_aten.mm, _aten.addmm):
        return left.shape[0], left.shape[1], right.shape[1], 1
    if packet in (_aten.bmm, _aten.baddbmm) and left.dim() == 3:
        return left.shape[1], left.shape[2], right.shape[2], left.shape[0]
    return None
