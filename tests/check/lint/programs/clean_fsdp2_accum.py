import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from mymodel import Transformer


def main(loader, accum=8):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = Transformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cuda")
    model.init_weights()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step, (x, y) in enumerate(loader):
        last = (step + 1) % accum == 0
        model.set_requires_gradient_sync(last)
        loss = model(x.cuda(), y.cuda()) / accum
        loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    dist.destroy_process_group()
