"""Which collectives add numbers up, in which type, seen on their way through torch's dispatcher."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.record.verification import Reduction
from paceline.runtime._torch_private import TorchDispatchMode, process_group_of, tree_leaves

_ADDS = ("allreduce", "all_reduce", "reduce_scatter")


class Reductions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every all-reduce and reduce-scatter under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._bytes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.name()
        kind = next((each for each in _ADDS if each in name), None)
        if kind is not None and ("c10d" in name):
            self._note(kind.replace("allreduce", "all_reduce"), func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors:
            return
        try:
            ranks = tuple(dist.get_process_group_ranks(process_group_of(args)))
        except (IndexError, RuntimeError, ValueError):  # a group that is gone
            ranks = ()
        largest = max(tensors, key=lambda each: each.numel())
        key = (kind, str(largest.dtype).removeprefix("torch."), ranks)
        self._seen[key] += 1
        self._bytes[key] += largest.nbytes

    def facts(self) -> tuple[Reduction, ...]:
        """What was seen, the most bytes first."""
        return tuple(
            Reduction(kind=kind, dtype=dtype, ranks=ranks, count=self._seen[key], num_bytes=size)
            for key, size in self._bytes.most_common()
            for kind, dtype, ranks in [key]
        )


@contextmanager
def watch_reductions(wanted: bool) -> Iterator[Reductions]:
    """Under it, where it is wanted: noting costs a Python call for every operation."""
    seen = Reductions()
    if not wanted:
        yield seen
        return
    with seen:
        yield seen
