import os
import random
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Deep(nn.Module):
    def __init__(self, depth=6, p=0.2):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])
        self.p = p

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < self.p:  # expect: ddp-unused-parameters
                continue
            x = x + layer(x)
        return x


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(Deep())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
