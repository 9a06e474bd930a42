import functools
import os
import pickle
import torch
import torch.distributed as dist


def get_world_size() -> int:
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def get_rank() -> int:
    if not dist.is_available():
        return 0
    if not dist.is_initialized():
        return 0
    return dist.get_rank()


def is_main_process() -> bool:
    return get_rank() == 0


def synchronize():
    if not dist.is_available() or not dist.is_initialized():
        return
    if get_world_size() == 1:
        return
    dist.barrier()


def reduce_dict(values, average=True):
    world = get_world_size()
    if world < 2:
        return values
    with torch.no_grad():
        names = sorted(values)
        stacked = torch.stack([values[k] for k in names])
        dist.reduce(stacked, dst=0)
        if get_rank() == 0 and average:
            stacked /= world
        return dict(zip(names, stacked))


def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)


def setup_for_distributed(is_master):
    import builtins
    old = builtins.print

    def print(*args, **kwargs):
        if is_master or kwargs.pop("force", False):
            old(*args, **kwargs)

    builtins.print = print
