import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from mymodel import Transformer


def main(loader):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = Transformer().cuda()
    for layer in model.layers:
        FSDP(layer)  # expect: fsdp-wrapper-discarded
    model = FSDP(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for x in loader:
        model(x.cuda()).mean().backward()
        opt.step()
        opt.zero_grad()
