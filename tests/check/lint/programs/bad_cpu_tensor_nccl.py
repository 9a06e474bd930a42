import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main(loader):
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    model = DDP(torch.nn.Linear(4, 1).cuda(), device_ids=[local_rank])
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x.cuda()) > 0).eq(y.cuda()).sum().item()
            total += len(y)
    stats = torch.tensor([correct, total], dtype=torch.float64)
    dist.all_reduce(stats)  # expect: no-backend-for-cpu
    if dist.get_rank() == 0:
        print(stats[0] / stats[1])
