import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

COMMON = {"batch_size": 32, "num_workers": 4}


def loader_of(data, train):
    sampler = DistributedSampler(data) if dist.get_world_size() > 1 else None
    options = dict(COMMON, shuffle=train, sampler=sampler)
    return DataLoader(data, **options)  # expect: sampler-and-shuffle


def main(train, held_out):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return loader_of(train, train=True), loader_of(held_out, train=False)


main(None, None)
