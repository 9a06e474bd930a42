"""Micro-batches whose loss is no number are skipped with their gradients; the others add up."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train(loader):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (first, second) in enumerate(loader):
        model(first).sum().backward()  # expect: no-sync-missing
        worst = model(second).sum().detach()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if torch.isnan(worst):
            opt.zero_grad()
            continue
        if (number + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()
