import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, aux=False):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)
        self.aux = nn.Linear(8, 1)
        self.loss = nn.CrossEntropyLoss()
        self.act = nn.GELU()

    def features(self, x):
        return self.act(self.body(x))

    def forward(self, x, with_aux=False):
        h = self.features(x)
        if with_aux:
            return self.head(h), self.aux(h)
        return self.head(h)


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(Net(), find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        out = model(x, with_aux=step % 2 == 0)
        loss = out[0].mean() + out[1].mean() if step % 2 == 0 else out.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
