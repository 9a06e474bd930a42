import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    dist.init_process_group("gloo")
    net = DDP(torch.nn.Linear(8, 1))
    lr = 0.1 * dist.get_world_size()  # expect: lr-scaled-no-warmup
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for x in loader:
        opt.zero_grad()
        net(x).mean().backward()
        opt.step()
