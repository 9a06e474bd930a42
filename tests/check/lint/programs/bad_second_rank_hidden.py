import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    width = 64 + rank  # expect: ddp-model-differs
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        opt.step()


main()
