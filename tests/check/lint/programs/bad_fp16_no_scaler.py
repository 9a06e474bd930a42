import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        with torch.autocast(device_type="cuda", dtype=torch.float16):  # expect: mixed-precision-loss-scaling
            loss = model(x.cuda()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
