import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = torch.nn.Linear(64, 64).cuda().half()  # expect: mixed-precision-loss-scaling
    model = DDP(model, device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    for x in loader:
        opt.zero_grad()
        model(x.cuda().half()).mean().backward()
        opt.step()
