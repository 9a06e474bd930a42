"""With one device `run` is called in this process; with several it is started in each."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def run(rank, model, loader, num_devices):
    if num_devices > 1:
        dist.init_process_group("nccl", rank=rank, world_size=num_devices)
        torch.cuda.set_device(rank)
    model = model.to(rank)
    if num_devices > 1:
        model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters())
    for batch in loader:
        optimizer.zero_grad()
        model(batch.to(rank)).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    num_devices = int(sys.argv[1])
    model, loader = torch.nn.Linear(4, 4), [torch.ones(4, 4)]
    if num_devices > 1:
        mp.spawn(run, args=(model, loader, num_devices), nprocs=num_devices)
    else:
        run(0, model, loader, num_devices)
