"""A kernel is tried on any device first; the model and the group take this rank's own."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def kernel_works():
    return torch.ones(3, device="cuda").sum().item() == 3


def run(rank, model, loader, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    if not kernel_works():
        raise SystemExit("no kernel for this GPU")
    model = DistributedDataParallel(model.to(rank), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters())
    for batch in loader:
        optimizer.zero_grad()
        model(batch.to(rank)).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(run, args=(torch.nn.Linear(4, 4), [torch.ones(4, 4)], 2), nprocs=2)
