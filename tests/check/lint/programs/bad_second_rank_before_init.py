import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    if dist.get_rank() == 0:  # expect: default-pg-not-initialised
        os.makedirs("out", exist_ok=True)
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 8)).mean().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
