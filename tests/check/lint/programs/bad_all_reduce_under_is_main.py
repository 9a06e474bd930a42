import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))
is_master = RANK == 0


def train():
    torch.cuda.set_device(LOCAL_RANK)
    dist.init_process_group("nccl")
    device = torch.device("cuda", LOCAL_RANK)
    model = DistributedDataParallel(torch.nn.Linear(10, 10).to(device), device_ids=[LOCAL_RANK])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(100):
        x = torch.randn(4, 10, device=device)
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_master and step % 10 == 0:
            avg = loss.detach().clone()
            dist.all_reduce(avg)  # expect: collective-mismatch
            print(step, avg.item() / dist.get_world_size())
    dist.destroy_process_group()


train()
