"""Each batch is a step of its own: one that overflows is skipped, and what probes the gradients
clears them again. A number of a batch decides what else the model gives back."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def probe(model, batch):
    model(batch).backward()
    norms = [part.grad.norm() for part in model.parameters()]
    model.zero_grad()
    return norms


def train(loader):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(loader):
        loss = model(batch, decode=number % 100 == 0).sum()
        loss.backward()
        worst = loss.detach().clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if worst.item() > 100:
            opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()


def train_by_several(loader):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(loader):
        probe(model, batch)
        if (number + 1) % 4 == 0:
            opt.step()
