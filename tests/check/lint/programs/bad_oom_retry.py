import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def step(model, opt, batch):
    loss = model(batch).mean()
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)


def main(loader):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(1024, 1024).cuda(), device_ids=[rank])
    opt = torch.optim.AdamW(model.parameters())
    for batch in loader:
        try:
            step(model, opt, batch.cuda())
        except torch.cuda.OutOfMemoryError:  # expect: rank-divergent-decision
            torch.cuda.empty_cache()
            continue
