import os
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def out_of_time(start, limit):
    flag = torch.zeros(1)
    if dist.get_rank() == 0 and time.time() - start > limit:
        flag.fill_(1)
    dist.broadcast(flag, 0)
    return flag.item() > 0


def main(loader):
    dist.init_process_group("gloo")
    start = time.time()
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, x in enumerate(loader):
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
        if i % 100 == 0 and out_of_time(start, 3600):
            break
    dist.destroy_process_group()
