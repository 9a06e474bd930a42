import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(batches):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    it = iter(batches)
    x = next(it)
    loss = model(x).pow(2).mean()
    while loss.item() > 1e-3:  # expect: rank-divergent-decision
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss = model(next(it)).pow(2).mean()
