"""Train a classifier.

    torchrun --nnodes=4 --nproc-per-node=8 train.py
"""
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device(f"cuda:{rank}")  # expect: invalid-device-ordinal
    torch.cuda.set_device(device)
    model = DDP(torch.nn.Linear(4, 4).to(device), device_ids=[device])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        opt.zero_grad()
        model(torch.randn(4, 4, device=device)).sum().backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
