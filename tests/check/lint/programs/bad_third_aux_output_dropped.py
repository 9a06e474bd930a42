import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.cls = nn.Linear(16, 4)
        self.box = nn.Linear(16, 4)  # expect: ddp-unused-parameters

    def forward(self, x):
        h = torch.relu(self.body(x))
        boxes = self.box(h)
        return self.cls(h), boxes


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        logits, _ = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
