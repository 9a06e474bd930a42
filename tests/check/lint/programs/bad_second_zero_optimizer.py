import os
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    for x in loader:
        model(x).mean().backward()
        opt.step()
        opt.zero_grad()
    if rank == 0:
        opt.consolidate_state_dict(to=0)  # expect: rank0-only-collective-save
        torch.save(opt.state_dict(), "opt.pt")
