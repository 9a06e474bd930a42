import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def owner_of(scheduler, model):
    return getattr(scheduler, "optimizer", None), model.parameters()


def main(loader, scheduler=None):
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    model = torch.nn.Linear(4, 4).to(gpu)
    print(getattr(model, "optimizer", None) is owner_of(scheduler, model))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in loader:
        model(x.to(gpu)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


main([])
