"""What a communication operation is: its kind, payload and group.

Sees both of torch's ways: `c10d` operations on process groups (FSDP2, DDP, pipelines) and
functional collectives (DTensor).
"""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from paceline.runtime._torch_private import process_group_of, tree_leaves

KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_into_tensor_coalesced": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_tensor_out": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce_coalesced": "all-reduce",
    "all_reduce_coalesced_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "all-reduce",
    "gather_": "all-gather",
    "scatter_": "broadcast",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "isend": "send",
    "irecv": "receive",
}
"""torch's names -> ours. A `reduce` and a `gather` to one rank are priced as if all had the result;
they do not occur in a step."""

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class Issued(NamedTuple):
    """One collective as one rank issues it."""

    kind: str
    num_bytes: int
    """Whole payload: the larger of what goes in and what comes out."""

    ranks: tuple[int, ...]
    """Ranks of the collective's group; for a send or receive, this rank and its partner."""

    is_overlapped: bool
    """Whether it is issued to run beside compute, as FSDP2, DDP and pipelines do. DTensor's are
    waited for at once."""


class Groups:
    """The ranks of process groups, looked up once each."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[tuple[int, ...], Any]] = {}

    def of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Global ranks of a group."""
        found = self._ranks.get(id(group))
        if found is None:
            found = tuple(dist.get_process_group_ranks(group)), group
            self._ranks[id(group)] = found
        return found[0]


def issued(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, groups: Groups
) -> Issued | None:
    """What an operation of one of `NAMESPACES` sends; None for those that send nothing."""
    name = func.overloadpacket.__name__
    kind = KINDS.get(name)
    if kind is None:
        return None
    group = process_group_of(args)
    ranks = groups.of(group)
    tensors_in = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    tensors = tensors_in + [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    sizes = [_size(each) for each in tensors]
    num_bytes = max(sizes, default=0)
    if kind == "all-reduce" and isinstance(args[0], list | tuple):
        num_bytes = sum(_size(each) for each in args[0])
    if name in ("allgather_", "reduce_scatter_", "alltoall_"):  # lists of tensors
        lists = [tree_leaves(arg) for arg in args[:2]]
        num_bytes = max(sum(map(_size, each)) for each in lists)
    if kind in ("send", "receive"):
        num_bytes = sum(_size(each) for each in tree_leaves(args[0]))
        ranks = (dist.get_rank(), _partner(args, ranks))
    return Issued(kind, num_bytes, ranks, func.namespace == "c10d")


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _partner(args: tuple[Any, ...], ranks: tuple[int, ...]) -> int:
    """Global rank of the other side of a send or receive; torch passes its place in the group."""
    places = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    place = places[0] if places else 0
    return ranks[place] if 0 <= place < len(ranks) else place
