import os
import functools
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def build(lr):
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)  # expect: fsdp-optimizer-before-wrap
    return model, optimizer


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model, optimizer = build(1e-4)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(model, auto_wrap_policy=policy, device_id=torch.cuda.current_device())
    for x in loader:
        model(x.cuda()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
