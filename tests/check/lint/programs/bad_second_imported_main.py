import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from utils.dist import get_rank, is_main_process


def log_stats(stats):
    if is_main_process():
        dist.all_reduce(stats)  # expect: collective-mismatch
        print(stats)


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        loss = model(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 0:
            log_stats(loss.detach())
