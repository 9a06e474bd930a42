import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def main(loader):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    half = MixedPrecision(param_dtype=torch.float16)
    model = FSDP(torch.nn.Linear(64, 64).cuda(), mixed_precision=half)
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = ShardedGradScaler()
    for x in loader:
        opt.zero_grad()
        scaler.scale(model(x.cuda()).mean()).backward()
        scaler.step(opt)
        scaler.update()
