"""Early stopping by a loss that all ranks share, and numbers that rounds hand on."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop, best, started = False, float("inf"), False
    for batch in loader:
        if stop:
            break
        if not started:
            dist.barrier()
            started = True
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        best = min(best, mean.item())
        stop = best < 0.1
