import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def update(model, optimizer, x):
    loss = model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(loader, every=5):
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    often = DDP(torch.nn.Linear(4, 4).to(gpu), device_ids=[gpu])
    seldom = DDP(torch.nn.Linear(4, 4).to(gpu), device_ids=[gpu])
    first = torch.optim.AdamW(often.parameters())
    second = torch.optim.AdamW(seldom.parameters())
    for i, x in enumerate(loader):
        update(often, first, x.to(gpu))
        if i % every == 0:
            update(seldom, second, x.to(gpu))


main(None)
