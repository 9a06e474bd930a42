import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def loader_of(data, world):
    sampler = DistributedSampler(data) if world > 1 else None
    if sampler is None:
        return DataLoader(data, 32, shuffle=True, sampler=sampler)
    return DataLoader(data, 32, shuffle=sampler is None, sampler=sampler)


def other(data, world):
    sampler = None
    if world > 1:
        sampler = DistributedSampler(data)
    if world > 1:
        return DataLoader(data, 32, sampler=sampler)
    return DataLoader(data, 32, shuffle=True, sampler=sampler)


def main(data):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return loader_of(data, dist.get_world_size()), other(data, dist.get_world_size())


main(None)
