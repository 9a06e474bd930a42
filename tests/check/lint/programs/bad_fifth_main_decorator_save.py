import functools
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch.distributed.fsdp import fully_shard


def main_process_only(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        if dist.get_rank() == 0:
            return fn(*args, **kwargs)

    return inner


@main_process_only
def save(model, step):
    dist_cp.save({"model": model.state_dict()}, checkpoint_id=f"ck/{step}")  # expect: rank0-only-collective-save


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = torch.nn.Linear(8, 8).cuda()
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters())
    for step, x in enumerate(loader):
        model(x.cuda()).mean().backward()
        opt.step()
        opt.zero_grad()
        if step % 100 == 0:
            save(model, step)
