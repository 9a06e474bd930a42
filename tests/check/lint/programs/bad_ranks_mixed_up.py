import os

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler


def main(data):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)  # expect: invalid-device-ordinal
    local_rank = int(os.environ["LOCAL_RANK"])
    return DistributedSampler(data, rank=local_rank)


def by_node(data):
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return DistributedSampler(data, rank=dist.get_rank())


main(torch.rand(4))
