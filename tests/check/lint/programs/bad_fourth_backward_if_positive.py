import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for anchor, other in loader:
        gap = (model(anchor) - model(other)).abs().mean()
        loss = torch.relu(1.0 - gap)
        if loss.item() > 0:  # expect: rank-divergent-decision
            opt.zero_grad()
            loss.backward()
            opt.step()
