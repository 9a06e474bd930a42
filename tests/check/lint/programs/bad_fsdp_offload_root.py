import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from mymodel import Transformer


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    model = Transformer()
    fully_shard(model, offload_policy=CPUOffloadPolicy())  # expect: fsdp-cpu-offload-oom
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in loader:
        model(x.cuda()).mean().backward()
        opt.step()
        opt.zero_grad()
