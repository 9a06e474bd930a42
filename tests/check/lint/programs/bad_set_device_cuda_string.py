import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

BACKEND = "nccl"


def setup():
    dist.init_process_group(backend=BACKEND, init_method="env://")  # expect: missing-set-device


def main():
    setup()
    device = torch.device("cuda")
    model = DDP(torch.nn.Linear(8, 8).to(device))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8, device=device)).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
