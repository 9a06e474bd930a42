import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = 0
    for x, mask in loader:
        if mask.sum() == 0:  # expect: rank-divergent-decision
            skipped += 1
            continue
        loss = (model(x) * mask).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    print(skipped)
