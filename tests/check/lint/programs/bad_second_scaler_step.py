import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler()
    for x in loader:
        opt.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(x.cuda()).mean()
        scaler.scale(loss).backward()
        opt.step()  # expect: mixed-precision-loss-scaling
        scaler.update()
