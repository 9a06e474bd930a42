import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    torch.cuda.set_device(0)  # expect: duplicate-gpu
    dist.init_process_group("nccl")


def main():
    setup()
    model = DDP(torch.nn.Linear(8, 1).cuda())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8).cuda()).mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
