import contextlib
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


@contextlib.contextmanager
def main_first(rank):
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        t = torch.tensor([self.sum, self.count])
        dist.all_reduce(t)
        self.sum, self.count = t.tolist()

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def main(loader, val):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with main_first(rank):
        cache = torch.load("cache.pt", weights_only=True) if os.path.exists("cache.pt") else torch.randn(10)
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    best = float("inf")
    for epoch in range(3):
        meter = AverageMeter()
        for x in loader:
            loss = model(x).mean() + cache.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter.update(loss.item(), len(x))
        meter.all_reduce()
        if meter.avg < best:
            best = meter.avg
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")
            dist.barrier()
        if meter.avg < 1e-3:
            break
    dist.destroy_process_group()
