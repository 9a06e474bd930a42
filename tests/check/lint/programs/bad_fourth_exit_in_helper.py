import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def check_loss(loss, step):
    if torch.isnan(loss) or torch.isinf(loss):
        return False
    return True


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        loss = model(x).mean()
        if not check_loss(loss, step):  # expect: rank-divergent-decision
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
