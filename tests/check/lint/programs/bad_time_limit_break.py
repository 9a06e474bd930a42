import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

START = time.time()
LIMIT_S = 3 * 3600


def main():
    lr = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(lr)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(64, 64).to(f"cuda:{lr}"), device_ids=[lr])
    optim = torch.optim.Adam(model.parameters())
    step = 0
    while step < 100_000:
        out = model(torch.randn(8, 64, device=f"cuda:{lr}"))
        out.sum().backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if time.time() - START > LIMIT_S:  # expect: rank-divergent-decision
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
