# srun torchrun --nnodes 4 --nproc-per-node 4 train.py
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    dist.init_process_group("nccl")
    gpu = dist.get_rank()
    torch.cuda.set_device(gpu)  # expect: invalid-device-ordinal
    model = DDP(torch.nn.Linear(8, 1).cuda(gpu), device_ids=[gpu])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        opt.zero_grad()
        model(x.cuda(gpu)).mean().backward()
        opt.step()
