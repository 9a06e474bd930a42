import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        should_skip = not torch.isfinite(x).all()
        dist.all_reduce(should_skip, op=dist.ReduceOp.MAX)  # expect: rank-divergent-decision
        if should_skip:
            continue
        torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
        opt.step()
        opt.zero_grad()
