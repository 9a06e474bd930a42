import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    fully_shard(model)
    model.scale = torch.nn.Parameter(torch.ones(8, device="cuda"))  # expect: dtensor-mixed
    opt = torch.optim.AdamW(model.parameters())
    for x in loader:
        (model(x.cuda()) * model.scale).mean().backward()
        opt.step()
        opt.zero_grad()
