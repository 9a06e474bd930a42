import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import always_wrap_policy


def main(train, val):
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = FSDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).cuda(), auto_wrap_policy=always_wrap_policy)
    opt = torch.optim.AdamW(model.parameters())
    for step, x in enumerate(train):
        model(x.cuda()).mean().backward()
        opt.step()
        opt.zero_grad()
        if step % 100 == 0:
            model.eval()
            if rank == 0:
                with torch.no_grad():
                    score = sum(model(v.cuda()).mean() for v in val)  # expect: rank0-only-validation
                print(step, score.item())
            model.train()
