"""Programs that the kit's checks start as processes of their own."""

ALONE = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
device, store, limit_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
began = time.monotonic()
try:
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=0,
        world_size=2, timeout=timedelta(seconds=limit_s),
    )
    dist.all_reduce(torch.ones(1, device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    print("made", time.monotonic() - began, flush=True)
except Exception as error:
    print(type(error).__name__, time.monotonic() - began, flush=True)
os._exit(0)
"""

HOLDER = """
import sys, time, torch
held = torch.ones(int(sys.argv[2]), dtype=torch.uint8, device=sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""

STICKY = """
import os, sys, torch
device = sys.argv[1]
table = torch.nn.Embedding(4, 4, device=device)
def fails(call):
    try:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__
    return "works"
first = fails(lambda: table(torch.tensor([9], device=device)))
print(first, fails(lambda: torch.ones(1, device=device) + 1), flush=True)
os._exit(0)
"""

SUM = """
import os, sys
import torch
import torch.distributed as dist
device, backend, store, rank = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
one = torch.full((1,), rank + 1.0, device=device)
dist.all_reduce(one)
print(one.item(), flush=True)
os._exit(0)
"""
