import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy


def main(loader):
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    model = FSDP(
        torch.nn.Linear(4, 4), device_id=gpu, sharding_strategy=ShardingStrategy.NO_SHARD
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in loader:
        model(x.to(gpu)).mean().backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters()], 1.0)
        optimizer.step()
        optimizer.zero_grad()


main(None)
