"""torchrun --standalone --nproc-per-node=8 train.py"""
import contextlib
import math
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from utils import compute_device, is_ddp, start

DEVICE, COORD = compute_device()
start()
if is_ddp():
    torch.cuda.set_device(COORD.local_rank)
tokens = torch.randint(0, 100, (1_000_000,))
model = torch.nn.Embedding(100, 100).to(DEVICE)
raw = model
if is_ddp():
    model = DistributedDataParallel(model, device_ids=[COORD.local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
accum = 8 // COORD.world_size if COORD.world_size < 8 else 4


def get_batch():
    i = torch.randint(len(tokens) - 65, (4,))
    x = torch.stack([tokens[j : j + 64] for j in i])
    return x.to(DEVICE), x.to(DEVICE)


for step in range(1000):
    if step % 100 == 0 and COORD.is_chief_rank:
        with torch.no_grad():
            x, y = get_batch()
            val = model(x).sum()
            dist.all_reduce(val)  # expect: collective-mismatch
    for micro in range(accum):
        sync = micro == accum - 1
        ctx = contextlib.nullcontext() if sync or not is_ddp() else model.no_sync()
        with ctx:
            x, y = get_batch()
            loss = torch.nn.functional.cross_entropy(model(x).view(-1, 100), y.view(-1)) / accum
            loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if COORD.is_chief_rank:
        print(step, loss.item() * accum)
    if step % 500 == 0:
        state = {"model": raw.state_dict(), "step": step}
        if COORD.is_chief_rank:
            torch.save(state, "ckpt.pt")
if is_ddp():
    dist.destroy_process_group()
