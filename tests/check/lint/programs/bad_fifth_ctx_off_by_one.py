import os
from contextlib import ExitStack
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader, k=4):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for n, x in enumerate(loader):
        with ExitStack() as stack:
            if n % k != k - 2:
                stack.enter_context(model.no_sync())  # expect: no-sync-off-by-one
            (model(x.cuda()).mean() / k).backward()
        if n % k == k - 1:
            opt.step()
            opt.zero_grad()
