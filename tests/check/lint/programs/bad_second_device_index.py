import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)  # expect: missing-set-device
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = DDP(torch.nn.Linear(8, 1).to(device))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8).to(device)).mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
