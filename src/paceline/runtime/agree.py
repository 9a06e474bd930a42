"""What the ranks of a training loop of your own decide and compare together."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.runtime.recovery.fingerprint import fingerprint


def all_ranks_agree(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank when `flag` is true on every rank, else False on every rank.

        if not all_ranks_agree(torch.isfinite(loss).all()):
            continue  # all ranks skip this batch, or none does

    A rank that skips a batch by itself leaves the others waiting in the next collective. Each call
    is an all-reduce of 4 bytes, after which the GPU is waited for. Without a process group, or with
    one rank, it is `flag`.

    Args:
        flag: This rank's own opinion: a bool, 0 or 1, or a tensor or array of one of these.

    Raises:
        TypeError: On every rank, when `flag` is something else on any: a text or a list is no
            opinion, and values are not compared.
    """
    mine = _vote(flag)
    lowest = mine
    if not _is_alone(group):
        votes = torch.tensor(mine, dtype=torch.int32, device=_device(group))
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
        lowest = int(votes.item())
    if lowest == _NO_VOTE:
        whose = f"{flag!r:.60}" if mine == _NO_VOTE else "another rank's flag"
        raise TypeError(f"all_ranks_agree takes True or False of each rank: {whose} is neither")
    return bool(lowest)


_NO_VOTE = -1
"""Below both votes, so that the lowest of all shows it."""


def _vote(flag: object) -> int:
    """1, 0, or `_NO_VOTE` for what is neither true nor false."""
    try:
        value = flag.item() if isinstance(flag, torch.Tensor | np.ndarray | np.generic) else flag
    except (RuntimeError, ValueError):  # of several elements
        return _NO_VOTE
    return int(value) if isinstance(value, int | float) and value in (0, 1) else _NO_VOTE


def replicas_differ(
    model: torch.nn.Module, group: dist.ProcessGroup | None = None
) -> tuple[str, tuple[int, ...]] | None:
    """The first parameter or gradient whose bits differ between ranks, and the ranks that
    hold other bits than most; None on every rank when all copies are equal.

        if step % 100 == 0 and (found := replicas_differ(model)):
            raise RuntimeError(f"replicas differ: {found}")  # ("layer.0.weight", (2,))

    Call it on every rank, after `backward` has averaged the gradients: from there on replicas of
    DDP are equal to the bit. Each rank hashes what it holds and sends 8 bytes a tensor. Where no
    bits are those of most ranks, as with two ranks, all are named.

    Leaves out: parameters that are sharded or split (DTensor), of which ranks hold different parts,
    and buffers, which BatchNorm computes from each rank's own samples.

    Args:
        model: The plain model, or its DDP.
        group: Ranks that hold copies of it; all ranks without one.
    """
    if _is_alone(group):
        return None
    mine = fingerprint(_copies(model))
    sums = mine.each.to(_device(group))
    rows = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, sums, group=group)
    table = torch.stack(rows).cpu()
    for name, column in zip(mine.names, table.T, strict=True):
        usual = column.mode().values
        if (odd := column != usual).any():
            whom = odd if 2 * odd.sum() < len(column) else torch.ones_like(odd)
            return name, tuple(whom.nonzero().flatten().tolist())
    return None


def _copies(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then gradients. A parameter without a gradient has an empty one:
    every rank sends as many numbers."""
    whole = [(n, p) for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    yield from ((name, each.detach()) for name, each in whole)
    for name, each in whole:
        gradient = each.new_empty(0) if each.grad is None else each.grad
        yield f"gradient of {name}", gradient.detach()


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    is_there = dist.is_available() and dist.is_initialized()
    return not is_there or dist.get_world_size(group) < 2


def _device(group: dist.ProcessGroup | None) -> torch.device | None:
    """Where the group can send from."""
    on_cpu = "cpu:gloo" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
