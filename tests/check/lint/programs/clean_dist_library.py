"""Helpers that other scripts import."""
import pickle

import torch
import torch.distributed as dist


def get_world_size():
    if not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size()


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def synchronize():
    if get_world_size() == 1:
        return
    dist.barrier()


def all_gather(data):
    world_size = get_world_size()
    if world_size == 1:
        return [data]
    output = [None] * world_size
    dist.all_gather_object(output, data)
    return output


def reduce_dict(values, average=True):
    world_size = get_world_size()
    if world_size < 2:
        return values
    with torch.no_grad():
        names = sorted(values)
        stacked = torch.stack([values[k] for k in names])
        dist.reduce(stacked, dst=0)
        if dist.get_rank() == 0 and average:
            stacked /= world_size
        return dict(zip(names, stacked))


def broadcast_object(obj, src=0):
    holder = [obj if get_rank() == src else None]
    dist.broadcast_object_list(holder, src=src)
    return holder[0]


def save_on_main(state, path):
    if get_rank() == 0:
        torch.save(state, path)
    synchronize()


def gather_to_main(t):
    if get_rank() == 0:
        parts = [torch.empty_like(t) for _ in range(get_world_size())]
        dist.gather(t, gather_list=parts, dst=0)
        return torch.cat(parts)
    dist.gather(t, dst=0)
    return None
