import os
import functools
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.utils import clip_grad_norm_


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    wrap = functools.partial(size_based_auto_wrap_policy, min_num_params=10_000)
    model = FullyShardedDataParallel(torch.nn.Linear(512, 512).cuda(), auto_wrap_policy=wrap)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in loader:
        model(x.cuda()).mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)  # expect: fsdp-clip-grad-norm
        opt.step()
        opt.zero_grad()
