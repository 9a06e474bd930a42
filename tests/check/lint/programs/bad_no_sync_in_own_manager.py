import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Micro:
    """`with micro:` around one micro-batch."""

    def __init__(self, model, every):
        self.model, self.every, self.done = model, every, 0

    def __enter__(self):
        last = self.done % self.every == 0
        self.inner = nullcontext() if last else self.model.no_sync()  # expect: no-sync-off-by-one
        self.inner.__enter__()
        return self

    def __exit__(self, *raised):
        self.inner.__exit__(*raised)
        self.done += 1

    def full(self):
        return self.done % self.every == 0


def main(loader):
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(4, 4).to(gpu), device_ids=[gpu])
    optimizer = torch.optim.AdamW(model.parameters())
    micro = Micro(model, 4)
    for x in loader:
        with micro:
            model(x.to(gpu)).mean().backward()
        if micro.full():
            optimizer.step()
            optimizer.zero_grad()


main(None)
