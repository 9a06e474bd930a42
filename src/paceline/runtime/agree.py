"""A decision that all ranks take together, for a training loop of your own."""

import torch
import torch.distributed as dist


def all_ranks_agree(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank when `flag` is true on every rank, else False on every rank.

        if not all_ranks_agree(torch.isfinite(loss).all()):
            continue  # all ranks skip this batch, or none does

    A rank that skips a batch by itself leaves the others waiting in the next collective. Each call
    is an all-reduce of 4 bytes, after which the GPU is waited for. Without a process group, or with
    one rank, it is `flag`.

    Args:
        flag: This rank's own opinion; a tensor of one element will do.
    """
    mine = bool(flag)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return mine
    on_cpu = "cpu:gloo" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    votes = torch.tensor(int(mine), dtype=torch.int32, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
