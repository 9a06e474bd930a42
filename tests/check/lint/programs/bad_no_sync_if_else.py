import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(loader, accumulation_steps=4):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.zero_grad()
    for i, (x, y) in enumerate(loader, start=1):
        x, y = x.cuda(), y.cuda()
        if (i + 1) % accumulation_steps != 0:
            with model.no_sync():  # expect: no-sync-off-by-one
                (torch.nn.functional.mse_loss(model(x), y) / accumulation_steps).backward()
        else:
            (torch.nn.functional.mse_loss(model(x), y) / accumulation_steps).backward()
        if i % accumulation_steps == 0:
            opt.step()
            opt.zero_grad()
