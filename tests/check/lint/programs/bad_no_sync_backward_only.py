import os
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train(loader, accum_steps=4):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % accum_steps == 0
        out = model(x.cuda())
        loss = torch.nn.functional.mse_loss(out, y.cuda()) / accum_steps
        with nullcontext() if last else model.no_sync():  # expect: ddp-sync-flag-late
            loss.backward()
        if last:
            opt.step()
            opt.zero_grad()
