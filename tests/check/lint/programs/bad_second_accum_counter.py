import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader, accum):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    micro = 0
    for x, y in loader:
        sync = micro % accum == 0
        if sync:
            loss = (model(x.cuda()) - y.cuda()).pow(2).mean() / accum
            loss.backward()
        else:
            with model.no_sync():  # expect: no-sync-off-by-one
                loss = (model(x.cuda()) - y.cuda()).pow(2).mean() / accum
                loss.backward()
        micro += 1
        if micro % accum == 0:
            opt.step()
            opt.zero_grad()
