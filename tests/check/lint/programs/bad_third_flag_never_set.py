import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Linear(8, 1)
        self.extra = nn.Linear(8, 1)  # expect: ddp-unused-parameters

    def forward(self, x, with_extra=False):
        out = self.main(x)
        if with_extra:
            out = out + self.extra(x)
        return out


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
