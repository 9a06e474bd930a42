"""A run of one process or of many; the main process judges the model under the wrapper, if any."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

many = "RANK" in os.environ and int(os.environ["RANK"]) != -1
rank, local_rank = 0, 0
if many:
    dist.init_process_group("nccl")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
is_main = rank == 0
device = f"cuda:{local_rank}"

torch.manual_seed(100 + rank)
model = torch.nn.Linear(32, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if many:
    model = DDP(model, device_ids=[local_rank])
by_choice = model.module if many else model
by_class = model
if isinstance(model, DDP):
    by_class = model.module
by_name = model.module if hasattr(model, "module") else model


@torch.no_grad()
def judge(candidate):
    candidate.eval()
    error = sum(candidate(torch.randn(4, 32, device=device)).square().mean() for _ in range(8))
    candidate.train()
    return error.item()


for step in range(1000):
    loss = model(torch.randn(16, 32, device=device)).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 100 == 0 and is_main:
        print(step, judge(by_choice), judge(by_class), judge(by_name))
        if not isinstance(model, DDP):
            print(judge(model))
if many:
    dist.destroy_process_group()
