import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.autograd.set_detect_anomaly(True)  # expect: debugging-left-on


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()


def entry():
    main([])
