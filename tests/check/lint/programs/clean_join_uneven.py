import os
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
samples = list(torch.randn(101, 8))
mine = samples[rank::world]
model = DDP(torch.nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    for x in mine:
        opt.zero_grad()
        model(x[None]).mean().backward()
        opt.step()
dist.destroy_process_group()
