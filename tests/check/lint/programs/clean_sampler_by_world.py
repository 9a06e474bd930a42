import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

data = torch.load("data.pt", weights_only=True)
sampler = DistributedSampler(data)
first = DataLoader(data, sampler=sampler)
sampler = SequentialSampler(data)  # the first loader has the other one
second = DataLoader(data, sampler=sampler)
chosen = DistributedSampler(data)
if dist.get_world_size() == 1:
    chosen = SequentialSampler(data)
third = DataLoader(data, sampler=chosen)
