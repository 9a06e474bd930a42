import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from mymodel import Transformer


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = Transformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # expect: fsdp-optimizer-before-wrap
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for x in loader:
        model(x.cuda()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
