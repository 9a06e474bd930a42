"""DDP broadcasts the running means of batch normalisation before a forward pass."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        return self.layers(x)


def main(loader, held_out):
    dist.init_process_group("gloo")
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        with torch.no_grad():
            for batch in held_out:
                print(model(batch).sum())  # expect: rank0-only-validation
