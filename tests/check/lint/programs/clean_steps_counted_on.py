"""Steps resume from the checkpoint's number, and engines count them: every rank has the same."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda(), device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
if os.path.exists("shared/last.pt"):
    kept = torch.load("shared/last.pt", map_location="cpu", weights_only=True)
    model.module.load_state_dict(kept["model"])
    done = kept["done"]
for _ in range(1000):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    done += 1
    if done % 50 == 0:
        total = loss.detach()
        dist.all_reduce(total)
dist.destroy_process_group()
