import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def clip(optimizer, limit):
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(held, limit)  # expect: fsdp-clip-grad-norm


def main(loader):
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl")
    model = FSDP(torch.nn.Linear(4, 4), device_id=gpu)
    groups = [{"params": [p for n, p in model.named_parameters() if "bias" not in n]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for x in loader:
        model(x.to(gpu)).mean().backward()
        clip(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()


main(None)
