"""Early stopping: the loss of one round decides at the top of the next."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop = False
    for batch in loader:
        if stop:  # expect: rank-divergent-decision
            break
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stop = loss.item() < 0.1
    patience = Patience()
    while not patience.over:  # what ends it is reduced
        loss = model(next(loader)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        patience.over = loss.item() < 0.1


class Patience:
    def __init__(self):
        self.over = False
