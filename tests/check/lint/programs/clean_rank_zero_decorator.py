import functools
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def rank_zero_only(fn):
    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        if dist.get_rank() == 0:
            return fn(*args, **kwargs)

    return wrapped


@rank_zero_only
def log(message):
    print(message)


@rank_zero_only
def save(model, path):
    torch.save(model.module.state_dict(), path)


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        opt.zero_grad()
        loss = model(x).mean()
        loss.backward()
        opt.step()
        if step % 100 == 0:
            log(f"{step} {loss.item()}")
            save(model, "model.pt")
            dist.barrier()
    dist.destroy_process_group()
