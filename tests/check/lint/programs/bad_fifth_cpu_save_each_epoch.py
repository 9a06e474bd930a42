import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def export(model, path):
    module = model.module
    module.cpu()  # expect: ddp-moved-after-wrap
    torch.save(module.state_dict(), path)


def main(loader, epochs=3):
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(8, 1).cuda(), device_ids=[local_rank])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for x in loader:
            opt.zero_grad()
            model(x.cuda()).mean().backward()
            opt.step()
        if rank == 0:
            export(model, f"e{epoch}.pt")
        dist.barrier()
